"""In: jobs of a run, commands with the names of SLURM's and PBS's. Out: what codescent submits, writes down, asks and
ends; a run folder is created beside its jobs. Does not run a scheduler: test_real_slurm.py does."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from scripts import CONFIG, GPUS, PBS, SLURM, programs_in, run_script, started_in

from codescent.base.errors import UserError
from codescent.data.text.download import GPT2_MERGES, GPT2_VOCABULARY
from codescent.jobs import leftovers, schedulers
from codescent.jobs.submitted import SUCCESSORS, Submitted, jobs_of, keep, new_folder
from codescent.record import RunFolder
from codescent.record.beginning import JOBS, MAKING, is_free
from codescent.verbs import cli, launch_jobs

RUN = Path("runs/gpt2_124m")
QSTAT = """Job Id: 4711.server
    Job_Name = gpt2_124m
    job_state = {state}
    Variable_List = PBS_O_HOME=/home/me,A="job_state = Q"
{more}"""


@pytest.fixture(autouse=True)
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "corpus.txt").write_text("a text " * 1000)
    for one in (GPT2_VOCABULARY, GPT2_MERGES):  # as downloaded; nothing here reads them
        path = tmp_path / "data" / one.name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    monkeypatch.setenv("CODESCENT_DATA_DIR", str(tmp_path / "data"))
    found = programs_in(tmp_path)
    monkeypatch.setenv("PATH", f"{found}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return found


NO_HISTORY = 'case " $* " in *" -x "*) echo "qstat: PBS is not configured to maintain job history" >&2; exit 2;; esac'


def answers(programs: Path, name: str, text: str, code: int = 0, err: str = "", before: str = "") -> None:
    """Have a program answer so, after a line of its own."""
    for end, said in (("out", text), ("err", err)):
        (programs / f"{name}.{end}").write_bytes(os.fsencode(said))
    (programs / name).write_text(
        f"#!/bin/sh\n{before}\ncat {programs}/{name}.out; cat {programs}/{name}.err >&2; exit {code}\n"
    )


def launch(*words: str | Path) -> int:
    return cli.run(["launch", *map(str, words)])


def submitted(target: str = "slurm", job: str = "7") -> Submitted:
    return keep(new_folder(RUN), target, job, "gpt2_124m", "gpt2_124m.sbatch", Path.cwd())


def test_submitted_jobs_are_kept(tmp_path: Path, programs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers(programs, "sbatch", "17;cluster\n")
    assert launch(*CONFIG, *SLURM, GPUS, "--times", "2", "--submit") == 0
    assert "job 17 of slurm is submitted; its log will be" in capsys.readouterr().out
    script = RUN / JOBS / "0001" / "gpt2_124m.sbatch"
    text = script.read_text()
    assert "scontrol show hostnames" in text
    assert text.count(f">>{tmp_path / script.parent / 'hosts'}") == 1
    (one,) = jobs_of(RUN)
    assert (one.target, one.job, one.script) == ("slurm", "17", "gpt2_124m.sbatch")


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (
            ("", 1, "sbatch: error: invalid account\nsbatch: x"),
            ": exit code 1: sbatch: error: invalid account; sbatch: x",
        ),
        (("", 3, ""), ": exit code 3: it said nothing"),
        (("", 1, "\udcff"), ": exit code 1: \ufffd"),
    ],
)
def test_a_job_that_is_refused_leaves_nothing(
    answer: tuple[str, int, str], said: str, programs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers(programs, "sbatch", *answer)
    assert launch(*CONFIG, *SLURM, GPUS, "--submit") == 2
    assert said in capsys.readouterr().err
    assert not RUN.parent.exists()
    RUN.mkdir(parents=True)  # what was there before stays
    assert launch(*CONFIG, *SLURM, GPUS, "--submit") == 2
    assert list(RUN.iterdir()) == []
    submitted()
    assert launch(*CONFIG, *SLURM, GPUS, "--submit") == 2
    assert [one.name for one in (RUN / JOBS).iterdir()] == ["0001"]


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("4711.server", "4711.server"),
        ("12\n4711.server\n", "4711.server"),
        ("1\nHave a nice day\n", "1"),
        ("Project 12 has 3 hours left.\n\udcff\n4711[].server\n", "4711[].server"),
    ],
)
def test_the_number_of_a_job_is_found_in_all_lines(answer: str, number: str, programs: Path) -> None:
    answers(programs, "qsub", answer)
    assert launch(*CONFIG, *PBS, "--submit") == 0
    assert [one.job for one in jobs_of(RUN)] == [number]


@pytest.mark.parametrize(
    ("said", "before"),
    [
        ("qsub: its answer has no number of a job: 12 jobs were refused. Look with qstat -u $USER, and", ""),
        ("was killed by SIGKILL: it said nothing", "kill -9 $$"),
        ("exit code 137: 12 jobs were refused", "cat $0.out; exit 137"),
        ("exit code 1: qsub: Socket timed out on send/recv", "echo qsub: Socket timed out on send/recv >&2; exit 1"),
        ("qsub: no answer in 1 seconds", "exec sleep 20"),
    ],
)  # fmt: skip
def test_a_job_that_may_exist_keeps_its_script(
    said: str, before: str, programs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(schedulers, "ANSWER_S", 1.0)
    answers(programs, "qsub", "12 jobs were refused", before=before)
    assert launch(*CONFIG, *PBS, "--submit") == 2
    out, err = capsys.readouterr()
    script = RUN / JOBS / "0001" / "gpt2_124m.pbs"
    stays = f"; the job may exist all the same, so its script stays: {Path.cwd() / script}"
    assert said in err.replace(stays, "")
    assert stays in err
    assert script.is_file()
    assert "submitted" not in out


def test_ctrl_c_during_a_submission_says_that_a_job_may_exist(
    programs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*args: object) -> str:
        raise KeyboardInterrupt

    answers(programs, "qsub", "17")
    monkeypatch.setattr("codescent.verbs.launch_jobs.submit", interrupted)
    assert launch(*CONFIG, *PBS, "--submit") == 130
    err = capsys.readouterr().err
    assert "qsub: Ctrl-C came before its answer; the job may exist all the same" in err
    assert (RUN / JOBS / "0001" / "gpt2_124m.pbs").is_file()


def test_a_chain_that_breaks_says_how_many_jobs_there_are(programs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers(programs, "sbatch", "17\n", before="if ls */*/jobs/0001/job-17.json; then exit 3; fi >/dev/null 2>&1")
    assert launch(*CONFIG, *SLURM, GPUS, "--times", "3", "--submit") == 2
    assert "1 of 3 jobs is submitted all the same: codescent launch runs/gpt2_124m --status" in capsys.readouterr().err


@pytest.mark.parametrize("target", [[*SLURM, GPUS], PBS])
def test_an_accepted_job_keeps_its_script(
    target: list[str], programs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The disk is full: the job is not written down, but it will read its script."""
    answers(programs, "sbatch", "17\n")
    answers(programs, "qsub", "17\n")

    def fails(path: Path, text: object, within: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("codescent.jobs.submitted.write_json", fails)
    assert launch(*CONFIG, *target, "--submit") == 2
    assert "job 17 is submitted, but not written down" in capsys.readouterr().err
    assert [one.stem for one in (RUN / JOBS / "0001").iterdir()] == ["gpt2_124m"]


def test_jobs_are_in_the_order_in_which_they_were_submitted(programs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--follow takes the first of a chain that has not ended: the others wait for it."""
    folder = new_folder(RUN)
    for number in ("100", "99", "98"):
        keep(folder, "slurm", number, "gpt2_124m", "gpt2_124m.sbatch", Path.cwd())
    submitted(job="7")
    assert [one.job for one in jobs_of(RUN)] == ["98", "99", "100", "7"]
    ask = 'case " $* " in *" 99 "*) [ -e ended ] || { touch ended; echo "RUNNING, 1, n1"; exit; };; *" 98 "*);; '
    answers(programs, "squeue", "COMPLETED, 1, n1\n", before=ask + '*) [ -e ended ] || echo "PENDING, 0, x"; esac')
    answers(programs, "sacct", "")
    Path("gpt2_124m-99.log").write_text("step 1\n")
    assert launch(RUN, "--follow") == 0
    out = capsys.readouterr().out
    assert "step 1" in out
    assert "slurm 99: completed" in out
    assert launch(RUN, "--follow") == 0  # all are over: the newest
    assert "slurm 7: completed" in capsys.readouterr().out


def test_words_without_effect_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    submitted()
    assert launch(RUN, "--status", "--", "foo", "a b") == 2
    assert "codescent launch RUN --status: -- foo 'a b' has no effect here" in capsys.readouterr().err


def test_without_the_command_nothing_is_submitted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin" if not Path("/usr/bin/sbatch").exists() else "/nowhere")
    assert launch(*CONFIG, *SLURM, GPUS, "--submit") == 2
    assert "is this a machine that submits jobs?" in capsys.readouterr().err
    assert not RUN.exists()


def test_successors_of_pbs_are_written_down(tmp_path: Path, programs: Path) -> None:
    answers(programs, "qsub", "4711.server\n")
    assert launch(*CONFIG, *PBS, "site.environment=none", "--submit") == 0
    script = RUN / JOBS / "0001" / "gpt2_124m.pbs"
    (tmp_path / "nodes").write_text("n2\nn1\nn1\n")
    nodes = str(tmp_path / "nodes")
    said = "Welcome to job 12\n4712.server\nHave a nice day"
    code, found = run_script(script.read_text(), tmp_path, PBS_NODEFILE=nodes, STOPS_mpiexec="75", SAYS_qsub=said)
    assert code == 0
    (again,) = [one.words for one in found if one.name == "qsub"]
    assert again == ["-v", "CODESCENT_START=1", str(tmp_path / script)]
    assert [one.job for one in jobs_of(RUN)] == ["4711.server", "4712.server"]
    assert (script.parent / "hosts").read_text() == "n1\nn2\n"
    code, found = run_script(script.read_text(), tmp_path, PBS_NODEFILE=nodes, STOPS_mpiexec="75", SAYS_qsub="Sure")
    assert code == 0
    assert [one.job for one in jobs_of(RUN)] == ["4711.server", "4712.server"]


@pytest.mark.parametrize(
    ("squeue", "sacct", "said"),
    [
        (("RUNNING, 1:00 of 4:00:00, n1\n",), ("",), "running, 1:00 of 4:00:00, n1"),
        (
            ("RUNNING, 1, n1\nPENDING, 0, x\nCOMPLETED, 1, n1\n",),
            ("",),
            "running, 1, n1; pending, 0, x; completed, 1, n1",
        ),
        (
            ("COMPLETED, 1, n1\nFAILED, 1, n1\n",),
            ("COMPLETED|1|0:0\nFAILED|2|1:0\n",),
            "exit code 0; failed after 2, exit",
        ),
        (("DEADLINE, 1:00 of 2:00, n1\n",), ("", 1, "accounting storage is disabled"), "deadline, 1:00 of 2:00, n1"),
        (("FAILED, 1:00 of 2:00, n1\n",), ("FAILED|00:01:00|1:0\n",), "failed after 00:01:00, exit code 1"),
        (("", 1, "slurm_load_jobs error: Invalid job id specified"), ("",), "unknown to the scheduler"),
        (("",), ("", 1, "accounting storage is disabled"), "how it ended is unknown: sacct"),
        (("", 1, "slurm_load_jobs error: Unable to contact"), ("FAILED|1|1:0",), "state is unknown: squeue"),
        (("",), ("abc\x1b",), "how it ended is unknown: sacct says abc\\x1b"),
        (("",), ("COMPLETED|1|0:0|x\n",), "how it ended is unknown: sacct says COMPLETED|1|0:0|x"),
        (("",), ("a site's word\nCANCELLED by 7|1|0:15\n\udcff",), "cancelled by 7 after 1, SIGTERM"),
        (("",), ("OUT_OF_MEMORY|1|0:125",), "out_of_memory after 1, signal 125"),
        (("RUNNING, 1, n\udcff\n",), ("",), "running, 1, n\ufffd"),
    ],
)
def test_states_of_slurm(
    squeue: tuple[str, ...], sacct: tuple[str, ...], said: str, programs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    submitted()
    answers(programs, "squeue", *squeue)  # type: ignore[arg-type]
    answers(programs, "sacct", *sacct)  # type: ignore[arg-type]
    is_down = "Unable" in str(squeue)
    assert launch(RUN, "--status") == is_down
    assert said in capsys.readouterr().out
    code = launch(RUN, "--cancel")
    out, err = capsys.readouterr()
    assert code == (2 if is_down else 0), err
    assert ("is asked to end" in out) == ("RUNNING" in squeue[0])
    if not (is_down or "RUNNING" in squeue[0]):
        assert launch(RUN, "--follow") == 0
        assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("qstat", "said"),
    [
        ((QSTAT.format(state="R", more=""),), "running"),
        ((QSTAT.format(state="F", more="    Exit_status = 271\n"),), "finished, exit code 271"),
        (("", 153, "qstat: Unknown Job Id 4711.server"), "unknown to the scheduler"),
        (("", 35, "qstat: Connection refused"), "state is unknown: qstat"),
        (("nonsense",), "its answer has no state"),
        ((QSTAT.format(state="R", more=""), 0, "", NO_HISTORY), "running"),
        (("", 153, "qstat: Unknown Job Id 4711.server", NO_HISTORY), "unknown to the scheduler"),
    ],
)
def test_states_of_pbs(qstat: tuple[str, ...], said: str, programs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One that the scheduler does not know does not hide the others."""
    submitted("pbs", "4711.server")
    submitted("slurm")
    answers(programs, "qstat", *qstat)  # type: ignore[arg-type]
    answers(programs, "squeue", "PENDING, 0:00 of 1:00, (Priority)\n")
    launch(RUN, "--status")
    out = capsys.readouterr().out
    assert said in out
    assert "pending, 0:00 of 1:00, (Priority)" in out


def test_a_job_that_cannot_be_cancelled_leaves_no_other(programs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in ("4711", "4712"):
        submitted("pbs", number)
    answers(programs, "qstat", QSTAT.format(state="R", more=""))
    answers(programs, "qdel", "", before='[ "$1" = 4712 ] && exit 0; echo qdel: Job has finished >&2; exit 35')
    assert launch(RUN, "--cancel") == 2
    out, err = capsys.readouterr()
    assert out == "pbs 4712: is asked to end\n"
    assert "qdel 4711: exit code 35: qdel: Job has finished" in err


def test_the_log_is_followed_in_whole_lines(
    programs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    submitted()
    monkeypatch.setattr(launch_jobs, "LOOK_S", 0.0)
    monkeypatch.setattr(launch_jobs, "ASK_EVERY", 1)
    log, parts = Path("gpt2_124m-7.log"), [b"step 1\nloss 3.\xc3", b"\xa91\n", b"the end"]

    def state(job: str) -> schedulers.JobStatus:
        with log.open("ab") as file:
            file.write(parts.pop(0) if parts else b"")
        return schedulers.JobStatus("running", is_over=not parts)

    state("7")
    scheduler = dataclasses.replace(schedulers.SCHEDULERS["slurm"], state=state)
    monkeypatch.setitem(schedulers.SCHEDULERS, "slurm", scheduler)  # type: ignore[arg-type]
    assert launch(RUN, "--follow") == 0
    assert capsys.readouterr().out == "step 1\nloss 3.é1\nthe end\nslurm 7: running\n"


def test_records_that_may_not_be_read_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    submitted()
    with pytest.MonkeyPatch.context() as patched:

        def refuses(path: Path) -> None:
            raise PermissionError(13, "Permission denied", str(path))

        patched.setattr(Path, "iterdir", refuses)
        assert launch(RUN, "--status") == 2
    assert f"{RUN / JOBS}: Permission denied: the records of the run's jobs are there" in capsys.readouterr().err


def test_kill_goes_to_the_hosts_of_the_jobs(tmp_path: Path, programs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (new_folder(RUN) / "hosts").write_text("n1\nn2\nn1\n")
    (programs / "ssh").write_text('#!/bin/sh\necho "$@" >>asked; [ "$5" = n1 ] && exit 0; exit 255\n')
    (programs / "ssh").chmod(0o755)
    assert launch(RUN, "--kill") == 1
    out, err = capsys.readouterr()
    assert "n1: nothing of this run is left" in out
    assert "n2: ssh does not reach it" in err
    asked = (tmp_path / "asked").read_text().splitlines()
    assert [line.split()[4] for line in asked] == ["n1", "n2"]
    assert all(f"-P -m codescent.jobs.leftovers {tmp_path / RUN} --end" in line for line in asked)
    assert launch(RUN, "--kill", "--hosts", "n1:4") == 0
    (programs / "ssh").unlink()
    monkeypath = str(programs)
    found = subprocess.run(
        [sys.executable, "-m", "codescent", "launch", str(RUN), "--kill"], check=False, capture_output=True, text=True,
        env={**os.environ, "PATH": monkeypath}, timeout=60,
    )  # fmt: skip
    assert (found.returncode, "Traceback" in found.stderr) == (2, False)
    assert "ssh: No such file or directory" in found.stderr


def test_what_a_host_says_cannot_change_the_terminal(programs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (programs / "ssh").write_text("#!/bin/sh\nprintf 'n1: \\033[31mx\\377\\n'\n")
    (programs / "ssh").chmod(0o755)
    assert launch(RUN, "--kill", "--hosts", "n1") == 0
    assert capsys.readouterr().out == "n1: \\x1b[31mx\ufffd\n"


def test_kill_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch("runs/typo", "--kill") == 2
    assert "runs/typo: there is no such run folder, and no process" in capsys.readouterr().err
    mine = subprocess.Popen(["sleep", "100"], env={**os.environ, leftovers.MARK: str(tmp_path / RUN)})
    try:
        assert launch(RUN, "--kill") == 0
        out = capsys.readouterr().out
        assert f"process {mine.pid}: sleep 100" in out
        assert "codescent launch runs/gpt2_124m --kill --hosts node1,node2" in out
        assert mine.wait(30) == -15
    finally:
        mine.kill()
        mine.wait()


@pytest.mark.parametrize("name", [f"../{{project}}/{RUN}", f"link/{RUN.name}"])
def test_kill_finds_a_run_by_any_name_of_its_folder(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The script was written for one name, and --kill gets another one."""
    RUN.mkdir(parents=True)
    Path("link").symlink_to("runs")
    given = name.format(project=tmp_path.name)
    assert launch(*CONFIG, f"run.folder={given}", "--to", "local", "--devices", "1", "site.environment=none") == 0
    (mark,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith(f"export {leftovers.MARK}=")]
    mine = subprocess.Popen(["bash", "-c", f"{mark}; exec sleep 100"])
    try:
        assert launch(RUN, "--kill") == 0
        assert f"process {mine.pid}: " in capsys.readouterr().out
        assert launch(given, "--kill") == 0
        assert mine.wait(30) == -15
    finally:
        mine.kill()
        mine.wait()


def test_a_run_begins_beside_its_jobs() -> None:
    made = submitted()
    assert is_free(RUN)
    run = RunFolder.create(RUN, "config", {})
    assert jobs_of(RUN) == [made]
    assert RunFolder.open(RUN).config_text == "config"
    assert {one.name for one in RUN.iterdir()} == {
        ".writer", JOBS, "checkpoints", "config.toml", "events.jsonl", "metrics.csv", "metrics.jsonl", "plan.json",
    }  # fmt: skip
    with pytest.raises(UserError, match="there is a run already"):
        RunFolder.create(RUN, "config", {})
    run.hold()
    run.delete_unused()
    run.release()
    assert [one.name for one in RUN.iterdir()] == [JOBS]
    assert jobs_of(RUN) == [made]
    RunFolder.create(RUN, "another", {})
    assert RunFolder.open(RUN).config_text == "another"


KILLED = """
import os, sys
from codescent.record import RunFolder
before = os.rename
count = int(sys.argv[2])
def rename(name, to, **folders):
    global count
    count -= 1
    if count < 0:
        os._exit(9)
    return before(name, to, **folders)
os.rename = rename
RunFolder.create(sys.argv[1], "first", {})
"""


@pytest.mark.parametrize("renames", range(6))
def test_a_creation_that_was_killed_begins_anew(renames: int) -> None:
    """Renames 1 to 6 are those of the files: the run is there with the last one only."""
    made = submitted()
    done = subprocess.run([sys.executable, "-c", KILLED, str(RUN), str(renames + 1)], timeout=60, check=False)
    assert done.returncode == 9
    assert (RUN / MAKING).is_dir()
    assert is_free(RUN)
    RunFolder.create(RUN, "second", {})
    assert RunFolder.open(RUN).config_text == "second"
    assert jobs_of(RUN) == [made]
    assert not (RUN / MAKING).exists()


def test_jobs_that_are_kept_while_a_run_begins_stay() -> None:
    """The second job of `--times 2` is written down while the first one begins the run."""
    for number in range(20):
        run = Path(f"runs/{number}")
        keep(new_folder(run), "slurm", "1", "x", "x", Path.cwd())
        errors: list[BaseException] = []

        def add(run: Path = run, errors: list[BaseException] = errors) -> None:
            try:
                for job in range(2, 8):
                    keep(new_folder(run), "slurm", str(job), "x", "x", Path.cwd())
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=add)
        thread.start()
        RunFolder.create(run, "config", {})
        thread.join(60)
        assert errors == []
        assert {one.job for one in jobs_of(run)} == set("1234567")
        assert RunFolder.open(run).config_text == "config"


def test_only_one_process_begins_a_run() -> None:
    submitted()
    (RUN / MAKING).mkdir()
    holder = RunFolder(RUN, "", {})
    holder.hold()
    with pytest.raises(UserError, match="is being written by"):
        RunFolder.create(RUN, "config", {})
    holder.release()
    RunFolder.create(RUN, "config", {})


def test_an_answer_of_squeue_that_is_none(programs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    submitted()
    answers(programs, "squeue", "abc")
    assert launch(RUN, "--status") == 1
    assert "state is unknown: squeue: its answer has no state of job 7: abc" in capsys.readouterr().out
    assert launch(*CONFIG, *SLURM, GPUS, "--submit") == 2
    assert "squeue: its answer has no state of job 7: abc" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ('["slurm"]', "(not a JSON object)"),
        ("[" * 100_000, "not the record of a job"),
        ({"target": "foo"}, "(target: is none of slurm, pbs)"),
        ({"target": ["slurm"], "moment": None}, "(target: is no text, moment: is no text)"),
        ({"job": 5}, "(job: is no text)"),
        ({"job": "a\0b"}, "(job: is no text)"),
        ({"job": "7\x1b[31m"}, "(job: has characters that do not print)"),
        ({"job": "--all"}, "(job: is not the number of a job)"),
        ({"folder": 3, "name": None}, "(name: is no text, folder: is no text)"),
        ({"more": 1}, "(unknown: more)"),
    ],
)
def test_a_broken_record_is_named(
    changed: str | dict[str, object], said: str, programs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With all that is wrong in it, by each command that reads it."""
    submitted()
    answers(programs, "sbatch", "17\n")
    path = RUN / JOBS / "0001" / "job-7.json"
    path.write_text(changed if isinstance(changed, str) else json.dumps(json.loads(path.read_text()) | changed))
    for words in ([RUN, "--status"], [RUN, "--follow"], [RUN, "--cancel"], [*CONFIG, *SLURM, GPUS, "--submit"]):
        assert launch(*words) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert f"{path}: not the record of a job" in err
        assert said in err
        assert "delete this file" in err


@pytest.mark.parametrize(("content", "said"), [(b"n1\n\xff\n", "is not the name of a host"), (None, "Is a directory")])
def test_hosts_that_cannot_be_read_are_named(
    content: bytes | None, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = new_folder(RUN) / "hosts"
    path.mkdir() if content is None else path.write_bytes(content)
    assert launch(RUN, "--kill") == 2
    err = capsys.readouterr().err
    assert f"error: {path}: " in err
    assert said in err


def test_a_log_that_is_a_folder(programs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = submitted()
    answers(programs, "squeue", "COMPLETED, 1, n1\n")
    log = Path(made.folder) / "gpt2_124m-7.log"
    log.mkdir()
    assert launch(RUN, "--follow") == 2
    assert f"error: {log}: Is a directory" in capsys.readouterr().err


def test_other_names_among_the_jobs_do_no_harm() -> None:
    (RUN / JOBS).mkdir(parents=True)
    (RUN / JOBS / "\u00b2").write_text("")
    assert [new_folder(RUN).name, new_folder(RUN).name] == ["0001", "0002"]


def test_what_cannot_be_created_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = os.mkdir

    def fails(path: str, *words: object, **named: object) -> None:
        if path == JOBS:
            raise OSError(28, "No space left on device")
        made(path, *words, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "mkdir", fails)
    with pytest.raises(UserError, match="No space left on device"):
        new_folder(RUN)
    assert not RUN.parent.exists()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nothere", "nothere: there is no such run folder; give the folder that --submit has named"),
        ("corpus.txt", "corpus.txt: is a file, not a run folder"),
        ("gpt2_124m", "gpt2_124m: is a config, not a run folder; its run folder is runs/gpt2_124m: it is not there"),
        ("mine.py", "mine.py: is a script, not a run folder; its run folder is runs/mine: codescent launch runs/mine "),
        ("no.py", "no.py: there is no such run folder"),
    ],
)
def test_what_is_no_run_folder_is_named(name: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.py").write_text("")
    Path("runs/mine").mkdir(parents=True)
    assert launch(name, "--status") == 2
    assert f"error: {said}" in capsys.readouterr().err


def test_records_that_cannot_be_read_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    RUN.mkdir(parents=True)
    assert launch(RUN, "--status") == 2
    assert "no job of this run was submitted" in capsys.readouterr().err
    submitted()
    (RUN / JOBS / "0001" / SUCCESSORS).write_text("4712.server\n")
    assert launch(RUN, "--status") == 2
    assert "not the number of a job and a moment: 4712.server" in capsys.readouterr().err
    (RUN / JOBS / "0001" / "job-7.json").write_text(json.dumps({"job": 7}))
    assert launch(RUN, "--status") == 2
    assert "not the record of a job" in capsys.readouterr().err
    assert started_in(Path.cwd()) == []
