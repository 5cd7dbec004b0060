"""In: configs, scripts, sites, machines. Out: `codescent launch` prints a script that bash reads, and that starts what
was meant, with the same words. Does not start ranks: test_jobs_runs.py does."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as draw
from scripts import Started, run_script, script_of

from codescent.jobs.job import LEAST_GRACE_S, grace_of, job_name
from codescent.verbs import cli

CONFIG = ("gpt2_124m", "data.corpus=corpus.txt", "train.global_batch_size=24", "train.microbatch_size=1")
SLURM = ("--to", "slurm", "--nodes", "2", "--devices", "4", "site.time=04:00:00")
GPUS = "site.devices=--gpus-per-node={n}"
PBS = ("--to", "pbs", "--nodes", "2", "--devices", "4", "site.time=1-00:00:00", "site.devices=ngpus={n}")
TARGETS = {
    "local": ("--to", "local", "--devices", "2"),
    "ssh": ("--to", "ssh", "--hosts", "a:2,b:1"),
    "torchrun": ("--to", "torchrun", "--hosts", "a:2,b:2"),
    "uneven torchrun": ("--to", "torchrun", "--hosts", "a:2,b:1"),
    "one torchrun": ("--to", "torchrun", "--devices", "2"),
    "elastic": ("--to", "torchrun", "--nodes", "1:4", "--hosts", "a", "--devices", "2", "--max-restarts", "3"),
    "openmpi": ("--to", "mpirun", "--hosts", "a:2,b:1", "site.mpi=openmpi"),
    "mpich": ("--to", "mpirun", "--hosts", "a:2,b:1", "site.mpi=mpich"),
    "intelmpi": ("--to", "mpirun", "--hosts", "a:2,b:1", "site.mpi=intelmpi"),
    "slurm": (*SLURM, GPUS),
    "pbs": PBS,
}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "corpus.txt").write_text("a text " * 1000)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", TARGETS)
def test_bash_reads_what_is_printed(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = script_of([*CONFIG, *TARGETS[name], 'run.name=it\'s a "run"'], capsys)
    (tmp_path / "script").write_text(text)
    subprocess.run(["bash", "-n", "script"], check=True, timeout=30)
    assert text.startswith("#!/bin/bash\n")
    assert "--resume=auto" in text


def starts(found: list[Started], name: str) -> Started:
    (one,) = [one for one in found if one.name == name]
    return one


COMMAND = ["codescent", "train", *CONFIG, "--resume=auto"]


def test_slurm_starts_a_rank_for_each_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site = ["site.cores=8", "site.binding=cores", "site.account=lab", "site.qos=high", "site.memory=0"]
    site += ["site.scratch=/scratch", "site.interface=ib0", 'site.container=["apptainer", "exec", "my image.sif"]']
    text = script_of([*CONFIG, *SLURM, GPUS, *site, 'site.options=["--constraint=a100"]', "site.mail=me@x.org"], capsys)
    directives = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]
    assert directives == [
        "--job-name=gpt2_124m", "--nodes=2", "--ntasks-per-node=4", "--gpus-per-node=4", "--cpus-per-task=8",
        "--account=lab", "--qos=high", "--time=04:00:00", "--mem=0", f"--chdir={tmp_path}", "--output=%x-%j.log",
        "--open-mode=append", "--requeue", "--signal=USR1@60", "--mail-type=BEGIN,END,FAIL,REQUEUE",
        "--mail-user=me@x.org", "--constraint=a100",
    ]  # fmt: skip
    code, found = run_script(text, tmp_path)
    srun = starts(found, "srun")
    image = ["apptainer", "exec", "my image.sif"]
    assert srun.words == ["--kill-on-bad-exit=1", "--cpus-per-task=8", "--cpu-bind=cores", *image, *COMMAND]
    assert code == 0
    assert len(srun.env["CODESCENT_TOKEN"]) == 64
    assert srun.env["CODESCENT_MARK"] == str(tmp_path / "runs" / "gpt2_124m")
    assert (srun.env["TMPDIR"], srun.env["GLOO_SOCKET_IFNAME"]) == ("/scratch", "ib0")


@pytest.mark.parametrize(
    ("code", "env", "ends", "requeued"),
    [
        (0, {}, 0, None),
        (1, {}, 1, None),
        (143, {}, 143, None),
        (75, {}, 0, "7"),
        (75, {"SLURM_RESTART_COUNT": "1"}, 0, "7"),
        (75, {"SLURM_RESTART_COUNT": "2"}, 75, None),
        (75, {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "3"}, 0, "5_3"),
    ],
)
def test_slurm_requeues_what_was_saved_before_its_limit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], code: int, env: dict[str, str], ends: int, requeued: str | None
) -> None:
    text = script_of([*CONFIG, *SLURM, "site.devices=none", "site.requeues=2"], capsys)
    ended, found = run_script(text, tmp_path, SLURM_JOB_ID="7", CODE_OF_srun=str(code), **env)
    assert ended == ends
    assert [one.words for one in found if one.name == "scontrol"] == ([["requeue", requeued]] if requeued else [])


def test_jobs_of_a_chain_wait_for_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert "#SBATCH --dependency=singleton\n" in script_of([*CONFIG, *SLURM, GPUS, "--times", "5"], capsys)


def test_pbs_starts_ranks_by_pals_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site = ["site.cores=8", "site.binding=cores", "site.account=lab", "site.partition=prod"]
    text = script_of([*CONFIG, *PBS, *site, 'site.options=["-l filesystems=home:eagle"]'], capsys)
    directives = [line.removeprefix("#PBS ") for line in text.splitlines() if line.startswith("#PBS ")]
    assert directives == [
        "-N gpt2_124m", "-l select=2:mpiprocs=4:ncpus=32:ngpus=4", "-l walltime=24:00:00", "-A lab", "-q prod",
        "-j oe", "-r y", "-l filesystems=home:eagle",
    ]  # fmt: skip
    (tmp_path / "nodes").write_text("n1\nn2\n")
    for start, again in (("", "1"), ("19", "20"), ("20", None)):
        env = {"PBS_NODEFILE": str(tmp_path / "nodes"), "CODE_OF_mpiexec": "75", "CODESCENT_START": start or "0"}
        code, found = run_script(text, tmp_path, **env)
        words = starts(found, "mpiexec").words
        options = [
            "-n",
            "8",
            "--ppn",
            "4",
            "--hostfile",
            str(tmp_path / "nodes"),
            "--cpu-bind",
            "depth",
            "--depth",
            "8",
        ]
        assert words[: len(options)] == options
        given_on = dict(words[at + 1].split("=", 1) for at, word in enumerate(words) if word == "--env")
        assert given_on["MASTER_ADDR"] == "10.0.0.1"
        assert {"CODESCENT_TOKEN", "CODESCENT_MARK", "CODESCENT_STOP_AT"} <= given_on.keys()
        assert words[-len(COMMAND) :] == COMMAND
        submitted = [one.words for one in found if one.name == "qsub"]
        assert submitted == ([["-v", f"CODESCENT_START={again}", "gpt2_124m.pbs"]] if again else [])
        assert code == (0 if again else 75)


@pytest.mark.parametrize(
    ("mpi", "words"),
    [
        (
            "openmpi",
            ["-np", "3", "--host", "a:2,b:1", "--map-by", "slot", "--bind-to", "none", "-x", "CODESCENT_TOKEN"],
        ),
        ("mpich", ["-n", "3", "-hosts", "a:2,b:1", "-genvlist"]),
        ("intelmpi", ["-n", "3", "-machine"]),
    ],
)
def test_mpirun_starts_as_many_ranks_as_there_are_slots(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], mpi: str, words: list[str]
) -> None:
    """The founding documents' `-np 2` on node1:2,node2:2 started two ranks, where four were meant."""
    code, found = run_script(script_of([*CONFIG, *TARGETS[mpi]], capsys), tmp_path)
    mpirun = starts(found, "mpirun")
    assert code == 0
    assert mpirun.words[: len(words)] == words
    assert mpirun.words[-len(COMMAND) :] == COMMAND
    assert mpirun.env["MASTER_ADDR"] == "10.0.0.1"
    passed = set(mpirun.words) | set(",".join(mpirun.words).split(","))
    assert {"CODESCENT_TOKEN", "CODESCENT_MARK", "MASTER_ADDR", "MASTER_PORT"} <= passed


def test_torchrun_starts_an_agent_on_each_node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = ["-m", *COMMAND]
    _, found = run_script(script_of([*CONFIG, *TARGETS["torchrun"]], capsys), tmp_path, "1")
    words = starts(found, "torchrun").words
    assert words[:6] == [
        "--nproc-per-node=2", "--nnodes=2", "--node-rank=1", "--master-addr=10.0.0.1", "--master-port=29400",
        "--local-addr=10.0.0.1",
    ]  # fmt: skip
    assert words[-len(module) :] == module
    assert "SIGUSR1,SIGUSR2" in words[6]
    for node, slots in (("0", "2"), ("1", "1")):
        _, found = run_script(script_of([*CONFIG, *TARGETS["uneven torchrun"]], capsys), tmp_path, node)
        assert starts(found, "torchrun").words[0] == f"--nproc-per-node={slots}"
    _, found = run_script(script_of([*CONFIG, *TARGETS["elastic"]], capsys), tmp_path)
    words = starts(found, "torchrun").words
    assert words[:7] == [
        "--nproc-per-node=2", "--nnodes=1:4", "--rdzv-backend=c10d", "--rdzv-id=gpt2_124m",
        "--rdzv-endpoint=10.0.0.1:29400", "--local-addr=10.0.0.1", "--rdzv-conf=is_host=1",
    ]  # fmt: skip
    assert words[7] == "--max-restarts=3"
    _, found = run_script(script_of([*CONFIG, *TARGETS["one torchrun"]], capsys), tmp_path)
    assert starts(found, "torchrun").words[1:3] == ["--nnodes=1", "--master-addr=127.0.0.1"]


def test_a_script_of_ones_own_keeps_its_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text("")
    words = ["train.py", "data", *SLURM, GPUS, "--", "--lr", "3e-4", "--name", "a b", "--nodes=9"]
    _, found = run_script(script_of(words, capsys), tmp_path)
    script = ["train.py", "data", "--lr", "3e-4", "--name", "a b", "--nodes=9"]
    assert starts(found, "srun").words == ["--kill-on-bad-exit=1", "python", *script]
    _, found = run_script(script_of(["train.py", *TARGETS["one torchrun"], "--", "--lr", "3e-4"], capsys), tmp_path)
    assert starts(found, "torchrun").words[-3:] == ["train.py", "--lr", "3e-4"]
    _, found = run_script(script_of(["train.py", *TARGETS["local"], "--", "x"], capsys), tmp_path)
    assert starts(found, "python3").words == [
        "-m", "codescent.launch.agent", "--ranks", "2", "--", "python", "train.py", "x",
    ]  # fmt: skip


PRINTABLE = draw.text(
    draw.characters(min_codepoint=32, max_codepoint=0x2FF, exclude_categories=("Cc", "Cs")), min_size=1
)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=15)
@given(word=PRINTABLE, target=draw.sampled_from(["slurm", "openmpi", "torchrun", "pbs"]))
@pytest.mark.hypothesis
def test_any_word_arrives_as_it_was_typed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], word: str, target: str
) -> None:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "nodes").write_text("n1\nn2\n")
    text = script_of(["train.py", *TARGETS[target], "--", word, "last"], capsys)
    _, found = run_script(text, tmp_path, "0", PBS_NODEFILE=str(tmp_path / "nodes"))
    name = {"slurm": "srun", "openmpi": "mpirun", "torchrun": "torchrun", "pbs": "mpiexec"}[target]
    assert starts(found, name).words[-3:] == ["train.py", word, "last"]


def test_the_component_of_torchx_is_python(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*CONFIG, "--to", "torchx", "--nodes", "2", "--devices", "4", "site.image=lab:1", "run.name=a$b"]
    text = script_of(words, capsys)
    (train,) = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    assert train.name == "train"
    assert "run.name=a$$b" in text  # torchx replaces what follows a single dollar sign


def test_grace_follows_the_longest_save() -> None:
    assert grace_of([]) == LEAST_GRACE_S
    assert grace_of([3.0, 120.0]) == 270


@pytest.mark.parametrize(
    ("text", "name"), [("a b", "a-b"), ("7b", "run-7b"), ("über", "ber"), ("x" * 99, "x" * 63), ("'", "run")]
)
def test_names_of_jobs_are_those_that_schedulers_take(text: str, name: str) -> None:
    assert job_name(text) == name


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--to", "slurm"], ["site.time=04:00:00", "site.devices=none", "--devices N"]),
        (["--to", "pbs", "--devices", "4"], ['site.devices="ngpus={n}"']),
        (["--to", "mpirun", "--hosts", "a:2"], ["site.mpi=openmpi, mpich or intelmpi"]),
        (["--to", "kubernetes", "--devices", "1"], ["site.image="]),
        ([*SLURM, GPUS, "--hosts", "a:2"], ["with --to slurm the scheduler chooses the machines"]),
        (["--to", "ssh", "--devices", "2"], ["--to ssh needs the names of the machines: --hosts node1:4,node2:4"]),
        (["--to", "torchrun", "--nodes", "2", "--devices", "2"], ["--to torchrun needs the names of the machines"]),
        (["--to", "ssh", "--hosts", "a:2,a:1,b:x"], ["a is named twice", 'given "b:x"; write HOST:SLOTS']),
        (["--to", "ssh", "--hosts", "a:2", "--nodes", "1"], ["leave out --nodes and --devices"]),
        (["--to", "local", "--nodes", "2", "--devices", "1"], ["--to local is this machine"]),
        ([*SLURM[:3], "1:4", *SLURM[4:], GPUS], ["only --to torchrun takes nodes that come and go"]),
        (["--to", "torchrun", "--nodes", "1:4", "--devices", "2"], ["--hosts with one name or address"]),
        ([*SLURM, GPUS, "--max-restarts", "3"], ["--max-restarts: --to slurm has no agent"]),
        ([*PBS, "--times", "3"], ["only jobs of SLURM follow each other"]),
        ([*SLURM, GPUS, "site.tme=1"], ["did you mean site.time?"]),
        ([*SLURM, GPUS, "--site", "lab"], ["there is no file sites/lab.toml"]),
        ([*SLURM, GPUS, "parallel.tp=3"], ["tp"]),
        ([], ["give --to TARGET: local, ssh"]),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(
    words: list[str], said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["launch", *CONFIG, *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    for text in said:
        assert text in err, err
    assert "Traceback" not in err


def test_saved_scripts_are_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["launch", *CONFIG, *SLURM, GPUS, "--out", "job.sbatch"]
    assert cli.run(words) == 0
    assert "sbatch job.sbatch begins the run" in (tmp_path / "job.sbatch").read_text()
    assert (tmp_path / "job.sbatch").stat().st_mode & 0o111
    assert cli.run(words) == 2
    assert "--out job.sbatch: is there already" in capsys.readouterr().err
    manifest = ["--to", "kubernetes", "--devices", "1", "site.image=x", "site.devices=none", "--out", "job.yaml"]
    assert cli.run(["launch", *CONFIG, *manifest]) == 0
    assert (tmp_path / "job.yaml").stat().st_mode & 0o777 == 0o600  # it has a secret


def test_keys_without_effect_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sites").mkdir()
    (tmp_path / "sites" / "lab.toml").write_text('time = "01:00:00"\nqos = "high"\ndevices = "none"\n')
    assert cli.run(["launch", *CONFIG, "--to", "pbs", "--devices", "2", "--site", "lab"]) == 0
    assert "site.qos (sites/lab.toml:2) has no effect with --to pbs" in capsys.readouterr().err
