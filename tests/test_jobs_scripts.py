"""In: configs, scripts, sites, machines. Out: `codescent launch` prints a script that bash reads, and that starts what
was meant, with the same words. Does not start ranks: test_jobs_runs.py does."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as draw
from scripts import COMMAND, CONFIG, GPUS, PBS, SLURM, TARGETS, programs_in, run_script, script_of, starts

from codescent.jobs.grace import LEAST_GRACE_S, grace_of
from codescent.jobs.hosts import AGENT
from codescent.jobs.job import job_name, read_hosts
from codescent.jobs.shape import Asked, shape_of
from codescent.jobs.slurm import directive
from codescent.record import RunFolder
from codescent.verbs import cli

END = str(int(time.time()) + 100_000)
"""When SLURM says that the job ends."""

FULL = (
    "site.time=04:00:00", "site.interface=ib0", "site.scratch=scratch/$USER", 'site.modules=["cuda/12.4"]',
    'site.before=["export NCCL_DEBUG=WARN"]',
)  # fmt: skip
"""Keys that every script of bash reads."""
LAUNCHER_OPTION = ('site.launcher=["--verbose"]', "site.scratch=/tmp/$USER")


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "corpus.txt").write_text("a text " * 1000)
    monkeypatch.setenv("USER", "me")
    monkeypatch.delenv("MASTER_PORT", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("site", [(), FULL])
def test_bash_reads_what_is_printed(
    name: str, site: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = script_of([*CONFIG, *TARGETS[name], *site, 'run.name=it\'s a "run"'], capsys)
    (tmp_path / "script").write_text(text)
    subprocess.run(["bash", "-n", "script"], check=True, timeout=30)
    assert text.startswith("#!/bin/bash\n")
    assert "--resume=auto" in text
    assert "python3 -m" not in text  # -P: a file of the user does not hide one of Python
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    # SC1091: files of the machine on which the script runs cannot be read here
    done = subprocess.run(["shellcheck", "-e", "SC1091", "script"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


def test_slurm_starts_a_rank_for_each_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site = ["site.cores=8", "site.binding=cores", "site.account=lab", "site.qos=high", "site.memory=0"]
    site += ["site.scratch=scratch/$USER", "site.interface=ib0", "site.mail=me@x.org"]
    site += ['site.container=["apptainer", "exec", "my image.sif"]', 'site.options=["--constraint=a100&ib"]']
    text = script_of([*CONFIG, *SLURM, GPUS, *site], capsys)
    directives = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]
    assert directives == [
        "--job-name=gpt2_124m", "--nodes=2", "--ntasks-per-node=4", "--gpus-per-node=4", "--cpus-per-task=8",
        "--account=lab", "--qos=high", "--time=04:00:00", "--mem=0", f"--chdir={tmp_path}", "--output=%x-%j.log",
        "--open-mode=append", "--requeue", "--signal=USR1@60", "--mail-type=BEGIN,END,FAIL,REQUEUE",
        '--mail-user=me@x.org', '--constraint="a100&ib"',
    ]  # fmt: skip
    code, found = run_script(text, tmp_path, SAYS_apptainer="70", SLURM_JOB_END_TIME=END)
    folders, srun = [one for one in found if one.name == "srun"]
    assert folders.words == ["--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "mkdir", "-p", "scratch/me"]
    image = ["apptainer", "exec", "my image.sif"]
    options = ["--export=ALL", "--kill-on-bad-exit=1", "--cpus-per-task=8", "--cpu-bind=cores"]
    assert srun.words == [*options, *image, *COMMAND]
    assert code == 0
    assert len(srun.env["CODESCENT_TOKEN"]) == 64
    assert srun.env["CODESCENT_MARK"] == str(tmp_path / "runs" / "gpt2_124m")
    assert srun.env["CODESCENT_STOP_AT"] == str(int(END) - 70)  # the end of the job as SLURM says it
    assert (srun.env["TMPDIR"], srun.env["GLOO_SOCKET_IFNAME"]) == ("scratch/me", "ib0")
    asked = [one.words for one in found if one.name == "apptainer"]
    assert asked == [[*image[1:], "python3", "-P", "-m", "codescent.jobs.grace", "runs/gpt2_124m", "7200"]]


@pytest.mark.parametrize(
    ("code", "env", "ends", "requeued"),
    [
        (0, {}, 0, None),
        (1, {"CODE_OF_srun": "1"}, 1, None),
        (143, {}, 143, None),
        (143, {"SAYS_scontrol": "JobState=RUNNING PreemptTime=None"}, 143, None),
        (143, {"SAYS_scontrol": "JobState=RUNNING PreemptTime=2026-01-01T00:00:00"}, 0, "7"),
        (75, {}, 0, "7"),
        (75, {"CODE_OF_srun": "9"}, 0, "7"),
        (75, {"CODE_OF_scontrol": "1"}, 75, "7"),
        (75, {"SLURM_RESTART_COUNT": "1"}, 0, "7"),
        (75, {"SLURM_RESTART_COUNT": "2"}, 75, None),
        (75, {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "3"}, 0, "5_3"),
        (143, {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "3", "SAYS_scontrol": "PreemptTime=2026"}, 0, "5_3"),
    ],
)
def test_slurm_requeues_what_was_saved_before_its_limit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], code: int, env: dict[str, str], ends: int, requeued: str | None
) -> None:
    """The ranks write the code of a stop into a file, and end with 0."""
    text = script_of([*CONFIG, *SLURM, "site.devices=none", "site.requeues=2"], capsys)
    stops = {"STOPS_srun": str(code)} if code > 1 else {}
    ended, found = run_script(text, tmp_path, SLURM_JOB_ID="7", **stops, **env)
    assert ended == ends
    is_last = env == {"SLURM_RESTART_COUNT": "2"}
    assert (
        "the last of 3 starts (site.requeues=2). The run goes on by: sbatch " in (tmp_path / "said").read_text()
    ) == is_last
    asked = [one.words for one in found if one.name == "scontrol" and one.words[0] == "requeue"]
    assert asked == ([["requeue", requeued]] if requeued else [])
    shown = [one.words for one in found if one.name == "scontrol" and one.words[0] == "show"]
    assert shown == ([["show", "job", "5_3" if "SLURM_ARRAY_JOB_ID" in env else "7"]] if code == 143 else [])


def test_jobs_of_a_chain_wait_for_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert "#SBATCH --dependency=singleton\n" in script_of([*CONFIG, *SLURM, GPUS, "--times", "5"], capsys)
    own = script_of([*CONFIG, *SLURM, GPUS, 'site.options=["--dependency=afterok:1"]'], capsys)
    assert "#SBATCH --dependency=afterok:1\n" in own


def test_pbs_starts_ranks_by_pals_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site = ["site.cores=8", "site.binding=cores", "site.account=lab", "site.partition=prod"]
    words = [*CONFIG, *PBS, *site, 'site.options=["-l filesystems=home:eagle"]', "site.environment=none"]
    assert cli.run(["launch", *words, "--out", "job.pbs"]) == 0
    text = (tmp_path / "job.pbs").read_text()
    directives = [line.removeprefix("#PBS ") for line in text.splitlines() if line.startswith("#PBS ")]
    assert directives == [
        "-N gpt2_124m", "-l select=2:ncpus=32:ngpus=4", "-l place=scatter", "-l walltime=24:00:00", "-A lab", "-q prod",
        "-j oe", "-k doe", "-r y", "-l filesystems=home:eagle",
    ]  # fmt: skip
    (tmp_path / "nodes").write_text("n1\nn2\n")
    nodes = str(tmp_path / "nodes")
    for start, again in (("", "1"), ("19", "20"), ("20", None)):
        code, found = run_script(text, tmp_path, PBS_NODEFILE=nodes, STOPS_mpiexec="75", CODESCENT_START=start)
        mpiexec = starts(found, "mpiexec")
        assert mpiexec.words == [
            "--envall", "-n", "8", "--ppn", "4", "--hostfile", nodes, "--cpu-bind", "depth", "--depth", "8",
            "--line-buffer", *COMMAND,
        ]  # fmt: skip
        assert (mpiexec.env["MASTER_ADDR"], mpiexec.env["WORLD_SIZE"]) == ("10.0.0.1", "8")
        assert {"CODESCENT_TOKEN", "CODESCENT_MARK", "CODESCENT_STOP_AT"} <= mpiexec.env.keys()
        submitted = [one.words for one in found if one.name == "qsub"]
        assert submitted == ([["-v", f"CODESCENT_START={again}", str(tmp_path / "job.pbs")]] if again else [])
        assert code == (0 if again else 75)
        is_last = f"the last of 21 starts (site.requeues=20). The run goes on by: qsub {tmp_path / 'job.pbs'}"
        assert (is_last in (tmp_path / "said").read_text()) == (again is None)
    assert run_script(text, tmp_path, PBS_NODEFILE=nodes, STOPS_mpiexec="75", CODE_OF_qsub="1")[0] == 75
    _, found = run_script(text, tmp_path, PBS_NODEFILE=nodes, STOPS_mpiexec="75", PBS_ARRAY_INDEX="3")
    (again,) = [one.words for one in found if one.name == "qsub"]  # of an array the element alone
    assert again == ["-J", "3-4:2", "-v", "CODESCENT_START=1", str(tmp_path / "job.pbs")]


def test_a_printed_script_of_pbs_does_not_guess_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = script_of([*CONFIG, *PBS], capsys)
    assert "#PBS -l select=2:ncpus=4:ngpus=4\n" in text  # by itself PBS gives the four ranks of a node one core
    (tmp_path / "nodes").write_text("n1\nn2\n")
    code, found = run_script(text, tmp_path, PBS_NODEFILE=str(tmp_path / "nodes"), STOPS_mpiexec="75")
    assert (code, [one for one in found if one.name == "qsub"]) == (75, [])
    assert starts(found, "mpiexec").words[7:9] == ["--cpu-bind", "none"]  # PALS would give each rank one core


@pytest.mark.parametrize(
    ("mpi", "words"),
    [
        ("openmpi", ["-np", "3", "--host", "a:2,b:1", "--map-by", "slot", "--bind-to", "none", "-x"]),
        ("mpich", ["-n", "3", "-hosts", "a:2,b:1", *COMMAND]),
        ("intelmpi", ["-n", "3", "-machine"]),
    ],
)
def test_mpirun_starts_as_many_ranks_as_there_are_slots(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], mpi: str, words: list[str]
) -> None:
    """In a script of a course `-np 2` on node1:2,node2:2 started two ranks, where four were meant."""
    text = script_of([*CONFIG, *TARGETS[mpi]], capsys)
    code, found = run_script(text, tmp_path, STOPS_mpirun="75", VIRTUAL_ENV="/v", EDITOR="vi")
    mpirun = starts(found, "mpirun")
    assert code == 75
    assert mpirun.words[: len(words)] == words
    assert mpirun.words[-len(COMMAND) :] == COMMAND
    assert mpirun.env["MASTER_ADDR"] == "10.0.0.1"
    assert ("MASTER_PORT" in mpirun.env) == (mpi == "mpich")  # the others have a name for the job
    folders = [
        one.words for one in run_script(script_of([*CONFIG, *TARGETS[mpi], *LAUNCHER_OPTION], capsys), tmp_path)[1]
    ]
    made, ranks = [words for words in folders if "--verbose" in words]
    assert made[-4:] == ["--verbose", "mkdir", "-p", "/tmp/me"]  # the options of the site reach all hosts
    assert ranks[-len(COMMAND) - 1 :] == ["--verbose", *COMMAND]
    if mpi == "openmpi":
        passed = {name for at, name in enumerate(mpirun.words) if mpirun.words[at - 1] == "-x"}
        assert {
            "CODESCENT_TOKEN",
            "CODESCENT_MARK",
            "CODESCENT_EXIT_FILE",
            "MASTER_ADDR",
            "PATH",
            "VIRTUAL_ENV",
        } <= passed
        assert "EDITOR" not in passed


@pytest.mark.parametrize(
    ("mpi", "words"),
    [
        ("openmpi", ["--map-by", "slot:PE=3", "--bind-to", "core"]),
        ("mpich", ["-bind-to", "core:3"]),
        ("intelmpi", ["-genv", "I_MPI_PIN", "1", "-genv", "I_MPI_PIN_DOMAIN", "3"]),
    ],
)
def test_mpirun_binds_each_rank_to_its_cores(mpi: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    text = script_of([*CONFIG, *TARGETS[mpi], "site.binding=cores", "site.cores=3"], capsys)
    assert " ".join(words) in text.replace("\\\n    ", "")
    assert cli.run(["launch", *CONFIG, *TARGETS[mpi], "site.cores=3"]) == 0
    said = "site.cores (command line) has no effect with --to mpirun without site.binding=cores"
    assert said in capsys.readouterr().err


def test_torchrun_starts_an_agent_on_each_node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = ["-m", *COMMAND]
    code, found = run_script(script_of([*CONFIG, *TARGETS["torchrun"]], capsys), tmp_path, "1", STOPS_torchrun="75")
    words = starts(found, "torchrun").words
    port = words[4].removeprefix("--master-port=")
    assert code == 75
    assert words[:6] == [
        "--nproc-per-node=2", "--nnodes=2", "--node-rank=1", "--master-addr=10.0.0.1", f"--master-port={port}",
        "--local-addr=10.0.0.1",
    ]  # fmt: skip
    assert 20_000 <= int(port) < 30_000
    assert words[-len(module) :] == module
    assert "SIGUSR1,SIGUSR2" in words[6]
    assert starts(found, "torchrun").env["PET_SHUTDOWN_TIMEOUT"] == "60"
    for node, slots in (("0", "2"), ("1", "1")):
        _, found = run_script(script_of([*CONFIG, *TARGETS["uneven torchrun"]], capsys), tmp_path, node)
        assert starts(found, "torchrun").words[0] == f"--nproc-per-node={slots}"
    _, found = run_script(script_of([*CONFIG, *TARGETS["elastic"]], capsys), tmp_path, MASTER_PORT="77")
    words = starts(found, "torchrun").words
    assert words[:7] == [
        "--nproc-per-node=2", "--nnodes=1:4", "--rdzv-backend=c10d", "--rdzv-id=gpt2_124m",
        "--rdzv-endpoint=10.0.0.1:77", "--local-addr=10.0.0.1", "--rdzv-conf=is_host=1",
    ]  # fmt: skip
    assert words[7] == "--max-restarts=3"
    _, found = run_script(script_of([*CONFIG, *TARGETS["one torchrun"]], capsys), tmp_path)
    assert starts(found, "torchrun").words[1:3] == ["--nnodes=1", "--master-addr=127.0.0.1"]


LAUNCHER = """#!{python}
import os, signal, sys, time
def on(number, frame):
    open(os.environ["CODESCENT_EXIT_FILE"], "w").write("75\\n")
    open("got", "a").write(signal.Signals(number).name + "\\n")
    time.sleep(0.3)
    sys.exit(1)  # as torchrun does
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, on)
open("ready", "w").close()
time.sleep(100)
"""


@pytest.mark.parametrize("name", ["one torchrun", "openmpi"])
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM, signal.SIGINT])
def test_signals_are_passed_on_once(
    name: str, number: signal.Signals, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """To the whole process group, as the terminal sends Ctrl-C. Open MPI gets SIGUSR1: it would kill the ranks."""
    text, programs = script_of([*CONFIG, *TARGETS[name]], capsys), programs_in(tmp_path)
    for program in ("torchrun", "mpirun"):
        (programs / program).write_text(LAUNCHER.format(python=sys.executable))
    (tmp_path / "script").write_text(text)
    env = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
    script = subprocess.Popen(["bash", "script"], cwd=tmp_path, env=env, process_group=0, stderr=subprocess.PIPE)
    end = time.monotonic() + 60
    while not (tmp_path / "ready").exists():
        assert time.monotonic() < end
        time.sleep(0.02)
    os.killpg(script.pid, number)
    _, err = script.communicate(timeout=60)
    asks = name == "openmpi" and number != signal.SIGUSR1
    assert (script.returncode, err) == (128 + number if asks else 75, b"")
    assert (tmp_path / "got").read_text() == ("SIGUSR1\n" if asks else f"{number.name}\n")


@pytest.mark.parametrize("name", ["one torchrun", "openmpi"])
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_that_comes_with_the_start_is_not_lost(
    name: str, number: signal.Signals, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The launcher is started, but the script does not know its process id yet."""
    text, programs = script_of([*CONFIG, *TARGETS[name]], capsys), programs_in(tmp_path)
    for program in ("torchrun", "mpirun"):
        (programs / program).write_text(LAUNCHER.format(python=sys.executable))
    comes = f"kill -{int(number)} $$\nwhile [ ! -e ready ]; do sleep 0.02; done\nlauncher=$!"
    (tmp_path / "script").write_text(text.replace("launcher=$!", comes))
    env = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "script"], cwd=tmp_path, env=env, timeout=60, check=False, capture_output=True)
    asks = name == "openmpi" and number != signal.SIGUSR1
    assert (done.returncode, done.stderr) == (128 + number if asks else 75, b"")
    assert (tmp_path / "got").read_text() == ("SIGUSR1\n" if asks else f"{number.name}\n")


LIMITED = {
    **TARGETS, "local": (*TARGETS["local"], "site.time=01:00:00"), "ssh": (*TARGETS["ssh"], "site.time=01:00:00"),
    "torchx": ("--to", "torchx", "--devices", "2", "site.image=x", "site.devices=none", "site.time=01:00:00"),
    "kubernetes": ("--to", "kubernetes", "--devices", "2", "site.image=x", "site.devices=none", "site.time=01:00:00"),
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in LIMITED if name != "elastic"])
def test_a_doctor_saves_nothing_and_is_not_started_again(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["doctor", "site.environment=none", *LIMITED[name]]) == 0
    out = capsys.readouterr().out
    assert "codescent doctor" in out
    for text in (
        "saves and stops",
        "STOP_AT",
        "began",
        "USR1@",
        "--requeue",
        "requeue ",
        "goes on",
        "and starts again",
    ):
        assert text not in out, text
    assert "backoffLimit: 0\n" in out or "max_retries=0," in out or name not in ("torchx", "kubernetes")


def test_a_script_of_ones_own_keeps_its_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text("")
    words = ["train.py", "data", *SLURM, GPUS, "--", "--lr", "3e-4", "--name", "a b", "--nodes=9"]
    _, found = run_script(script_of(words, capsys), tmp_path)
    script = ["train.py", "data", "--lr", "3e-4", "--name", "a b", "--nodes=9"]
    assert starts(found, "srun").words == ["--export=ALL", "--kill-on-bad-exit=1", "python", *script]
    assert starts(found, "srun").env["CODESCENT_MARK"] == str(tmp_path / "runs" / "train")  # where --submit keeps jobs
    _, found = run_script(script_of(["train.py", *TARGETS["one torchrun"], "--", "--lr", "3e-4"], capsys), tmp_path)
    assert starts(found, "torchrun").words[-3:] == ["train.py", "--lr", "3e-4"]
    _, found = run_script(script_of(["train.py", *TARGETS["local"], "--", "x"], capsys), tmp_path)
    assert starts(found, "python3").words == [
        "-P", "-m", "codescent.launch.agent", "--ranks", "2", "--", "python", "train.py", "x",
    ]  # fmt: skip


def test_a_file_of_the_user_hides_none_of_python(tmp_path: Path) -> None:
    (tmp_path / "secrets.py").write_text("raise SystemExit(9)")
    subprocess.run([sys.executable, *AGENT[1:], "--help"], check=True, stdout=subprocess.DEVNULL, timeout=60)


PRINTABLE = draw.text(
    draw.characters(min_codepoint=32, max_codepoint=0x2FF, exclude_categories=("Cc", "Cs")), min_size=1
)
NAMES = {"slurm": "srun", "openmpi": "mpirun", "torchrun": "torchrun", "pbs": "mpiexec"}
PROPERTY = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=15)


@PROPERTY
@given(word=PRINTABLE | draw.sampled_from(["a\nb", "END_OF_AGENT\n}", "\r"]), target=draw.sampled_from(sorted(NAMES)))
@pytest.mark.hypothesis
def test_any_word_arrives_as_it_was_typed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], word: str, target: str
) -> None:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "nodes").write_text("n1\nn2\n")
    text = script_of(["train.py", *TARGETS[target], "--", word, "last"], capsys)
    _, found = run_script(text, tmp_path, "0", PBS_NODEFILE=str(tmp_path / "nodes"))
    assert starts(found, NAMES[target]).words[-3:] == ["train.py", word, "last"]


@PROPERTY
@given(word=PRINTABLE | draw.sampled_from(["--comment=two words", 'a "b\\', "it's", "--x=a#b", "\\"]))
@pytest.mark.hypothesis
def test_options_of_sbatch_are_quoted_as_it_reads_them(word: str) -> None:
    """Within double quotes sbatch 22.05 reads a backslash as Python's shlex does (tried with real daemons)."""
    line = directive(shlex.quote(word))
    assert line.startswith("#SBATCH ")
    assert shlex.split(line.removeprefix("#SBATCH ")) == [word]


HOSTS = draw.dictionaries(
    draw.from_regex(r"[a-z]([a-z0-9.-]{0,8}[a-z0-9])?", fullmatch=True), draw.integers(1, 9), min_size=2, max_size=5
)


@PROPERTY
@given(hosts=HOSTS, mpi=draw.sampled_from(["openmpi", "mpich"]))
@pytest.mark.hypothesis
def test_hosts_and_slots_arrive_as_they_were_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], hosts: dict[str, int], mpi: str
) -> None:
    (tmp_path / "train.py").write_text("")
    given_as = ",".join(f"{host}:{slots}" for host, slots in hosts.items())
    text = script_of(["train.py", "--to", "mpirun", "--hosts", given_as, f"site.mpi={mpi}"], capsys)
    words = starts(run_script(text, tmp_path)[1], "mpirun").words
    assert words[1] == str(sum(hosts.values()))
    assert read_hosts(words[3]) == (tuple(hosts), tuple(hosts.values()))
    text = script_of(["train.py", "--to", "ssh", "--hosts", given_as], capsys)
    arrays = "".join(line for line in text.splitlines(keepends=True) if line.startswith(("hosts=(", "slots=(")))
    said = subprocess.check_output(["bash", "-c", f'{arrays}echo "${{hosts[@]}}"; echo "${{slots[@]}}"'], text=True)
    assert said.split() == [*hosts, *map(str, hosts.values())]
    assert shape_of("ssh", Asked(hosts=given_as), None).possible == [sum(hosts.values())]


def test_grace_follows_the_longest_save(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert grace_of([]) == LEAST_GRACE_S
    assert grace_of([3.0, 120.0]) == 270
    words = [sys.executable, "-m", "codescent.jobs.grace", "runs/gpt2_124m"]
    assert subprocess.check_output([*words, "7200"], timeout=60) == b"60\n"  # it has not begun
    run = RunFolder.create("runs/gpt2_124m", "", {})
    run.event("checkpoint", step=1, path="x", seconds=120.0, best=False)
    assert subprocess.check_output([*words, "7200"], timeout=60) == b"270\n"
    assert subprocess.check_output([*words, "100"], timeout=60) == b"100\n"
    done = subprocess.run([*words, "\u00b2"], check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, "MOST is a whole number of seconds" in done.stderr) == (2, True), done.stderr
    text = script_of([*CONFIG, *SLURM, GPUS], capsys)
    assert "#SBATCH --signal=USR1@270\n" in text
    _, found = run_script(text, tmp_path, GRACE="300", SLURM_JOB_END_TIME=END)
    assert starts(found, "srun").env["CODESCENT_STOP_AT"] == str(int(END) - 300)
    _, found = run_script(text.replace("python3 -P -m codescent.jobs.grace", "false"), tmp_path, SLURM_JOB_END_TIME=END)
    assert starts(found, "srun").env["CODESCENT_STOP_AT"] == str(int(END) - 270)  # as it was when it was written
    for none in (
        "Unknown",
        "1700000000",
    ):  # SLURM knows no end; that of an earlier job, of the shell that has submitted
        began = int(time.time())
        _, found = run_script(text, tmp_path, GRACE="300", SLURM_JOB_END_TIME=none)
        assert int(starts(found, "srun").env["CODESCENT_STOP_AT"]) >= began + 4 * 3600 - 300


def test_the_time_limit_counts_from_the_begin_of_the_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`date` says one second more at each call: as if the modules took their time."""
    text = script_of([*CONFIG, *TARGETS["local"], "site.time=00:10:00", 'site.before=["date +%s >/dev/null"]'], capsys)
    (programs_in(tmp_path) / "date").write_text("#!/bin/bash\necho x >>calls; echo $((1000 + $(wc -l <calls)))\n")
    (tmp_path / "programs" / "date").chmod(0o755)
    _, found = run_script(text, tmp_path)
    assert starts(found, "python3").env["CODESCENT_STOP_AT"] == str(1001 + 600 - 60)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("a b", "a-b"),
        ("7b", "run-7b"),
        ("über", "ber"),
        ("x" * 99, "x" * 54),
        ("'", "run"),
        (f"{'x' * 53}-{'y' * 10}", "x" * 53),
    ],
)
def test_names_of_jobs_are_those_that_schedulers_take(text: str, name: str) -> None:
    """One that had to be changed has a hash of the real one."""
    changed = job_name(text)
    assert changed == f"{name}-{zlib.crc32(text.encode()):08x}"
    assert job_name(changed) == changed
    assert len(changed) <= 63


def test_scripts_of_one_name_in_two_folders_are_two_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--kill of one must not end the other: it goes by the mark."""
    scripts = [tmp_path / "train.py", tmp_path / "ea" / "train.py", tmp_path / "eb" / "train.py"]
    for script in scripts:
        script.parent.mkdir(exist_ok=True)
        script.write_text("")

    def mark(script: str) -> str:
        text = script_of([script, *TARGETS["local"]], capsys)
        return next(line for line in text.splitlines() if line.startswith("export CODESCENT_MARK="))

    assert mark("train.py") == f"export CODESCENT_MARK={tmp_path}/runs/train"
    assert len({mark(str(script.relative_to(tmp_path))) for script in scripts}) == 3
    for script in scripts:
        assert mark(str(script)) == mark(f"ea/../{script.relative_to(tmp_path)}")


def test_environments_of_conda_are_activated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, own = tmp_path / "conda", tmp_path / "conda" / "envs" / "my"
    for folder in (base, own):
        (folder / "conda-meta").mkdir(parents=True)
    (base / "bin").mkdir()
    words = [*CONFIG, *TARGETS["local"]]
    assert f"export PATH={own}/bin:$PATH" in script_of([*words, f"site.environment={own}"], capsys)
    (base / "bin" / "activate").touch()
    assert f"source {base}/bin/activate {own}\n" in script_of([*words, f"site.environment={own}"], capsys)
    assert f"source {base}/bin/activate\n" in script_of([*words, f"site.environment={base}"], capsys)
    assert 'source "$HOME/venv/bin/activate"\n' in script_of([*words, "site.environment=$HOME/venv"], capsys)


def test_saved_scripts_are_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["launch", *CONFIG, *SLURM, GPUS, "--out", "job.sbatch"]
    assert cli.run(words) == 0
    assert f"sbatch {tmp_path}/job.sbatch begins the run" in (tmp_path / "job.sbatch").read_text()
    assert (tmp_path / "job.sbatch").stat().st_mode & 0o111
    assert cli.run(words) == 2
    assert "--out job.sbatch: is there already" in capsys.readouterr().err


def test_keys_without_effect_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sites").mkdir()
    (tmp_path / "sites" / "lab.toml").write_text('time = "01:00:00"\nqos = "high"\ndevices = "none"\n')
    assert cli.run(["launch", *CONFIG, "--to", "pbs", "--devices", "2", "--site", "lab"]) == 0
    assert "site.qos (sites/lab.toml:2) has no effect with --to pbs" in capsys.readouterr().err
