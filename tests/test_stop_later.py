"""In: runs that a scheduler asks to save, by a signal or its time limit. Out: exit code 75; the next start goes on.
Does not use a scheduler: the signals and variables are those that SLURM sends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from runs import codescent, environment, make_project
from test_running import ENDLESS, TIMEOUT_S, Run

from codescent.base.stopping import LATER, exit_code_of
from codescent.base.time_limit import GRACE_S, OLD_S, forget_others, stop_at
from codescent.data.text.request import make_request
from codescent.launch.launchers import TORCHRUN_SET
from codescent.record import RunFolder


@pytest.fixture
def project(tmp_path: Path) -> Path:
    make_project(tmp_path)
    return tmp_path


@pytest.fixture
def runs() -> Iterator[list[Run]]:
    made: list[Run] = []
    yield made
    for run in made:
        run.close()


def goes_on(project: Path, *words: str) -> None:
    """The same command continues the run from its save."""
    (checkpoint,) = (project / "runs" / "endless" / "checkpoints").iterdir()
    step = int(checkpoint.name.removeprefix("step_"))
    last = [*ENDLESS, f"train.num_steps={step + 1}", *words]
    done = codescent(project, "train", "run.toml", *last, "--resume=auto")
    assert done.returncode == 0, done.stderr
    assert f"at step {step}\n" in done.stdout
    assert RunFolder.open(project / "runs" / "endless").read_metrics()[-1]["step"] == step + 1


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("number", [signal.SIGUSR1, pytest.param(signal.SIGUSR2, marks=pytest.mark.slow)])
def test_a_scheduler_may_ask_a_run_to_save_and_come_again(
    project: Path, runs: list[Run], ranks: int, number: signal.Signals
) -> None:
    """SLURM repeats signals, and sends SIGCONT and SIGTERM after the one that was asked for."""
    runs.append(run := Run(project, ranks))
    run.steps()
    run.process.send_signal(number)
    run.until("said", rf"codescent: {number.name}: ")
    for one in (number, signal.SIGCONT, signal.SIGTERM):
        with contextlib.suppress(ProcessLookupError):
            run.process.send_signal(one)
    code, out, err = run.end()
    assert code == LATER, err
    assert re.search(rf"stopped at step \d+ by {number.name}; saved in", out)
    said = "saves and stops after this step" if ranks == 1 else "waiting for the ranks to save and stop"
    assert err.startswith(f"codescent: {number.name}: {said}")
    (event,) = [one for one in RunFolder.open(project / "runs" / "endless").read_events() if one["kind"] == "stop"]
    assert (event["signal"], event["exit_code"]) == (number.name, LATER)
    goes_on(project)


def test_a_signal_to_one_rank_stops_all(project: Path, runs: list[Run]) -> None:
    """srun sends the signal to the ranks, not to the command that started them."""
    runs.append(run := Run(project, 2))
    run.steps()
    run.ranks[1].send_signal(signal.SIGUSR1)
    code, out, err = run.end()
    assert code == LATER, err
    assert re.search(r"stopped at step \d+ by SIGUSR1 to rank 1 ", out)


def test_a_signal_ends_the_wait_for_ranks_that_do_not_come(project: Path) -> None:
    """Nothing has begun, so the job may simply come again. But it does not come for ever."""
    code, err = waited_in_vain(project, SLURM_JOB_ID="7")
    assert code == LATER, err
    assert "SIGUSR1: stopped before the run began" in err
    code, err = waited_in_vain(project, SLURM_JOB_ID="7", SLURM_RESTART_COUNT="1")
    assert code == 1, err
    assert "the last 2 starts of this job ended before the run began" in err


def waited_in_vain(project: Path, **env: str) -> tuple[int, str]:
    """Rank 0 of two is asked to stop while it waits. Returns exit code and standard error."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        at = probe.getsockname()
    env = environment(**env, **dict(zip(TORCHRUN_SET, map(str, (0, 0, 2, 2, *at)), strict=True)))
    words = [sys.executable, "-m", "codescent", "train", "run.toml"]
    process = subprocess.Popen(words, cwd=project, env=env, stdout=-1, stderr=-1, text=True)
    while True:
        with contextlib.suppress(ConnectionRefusedError), socket.create_connection(at):
            break
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGUSR1)
    _, err = process.communicate(timeout=30)
    return process.returncode, err


def prepare(project: Path) -> None:
    """Prepare the data of the runs."""
    done = codescent(project, "data", "corpus.txt", "--tokenizer", "byte")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_run_saves_before_the_time_is_over(
    project: Path, monkeypatch: pytest.MonkeyPatch, runs: list[Run], ranks: int
) -> None:
    prepare(project)
    monkeypatch.setenv("CODESCENT_STOP_AT", str(int(time.time())))
    runs.append(run := Run(project, ranks))
    code, out, err = run.end()
    assert code == LATER, err
    assert "stopped at step 1 by the time limit of the job (CODESCENT_STOP_AT=" in out
    monkeypatch.delenv("CODESCENT_STOP_AT")
    goes_on(project)


def test_a_job_that_is_started_in_vain_ends(project: Path, runs: list[Run], monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a node that fails in each start: SLURM starts the job again and again."""
    for start in range(2):
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(start))
        runs.append(run := Run(project, 1, resume=start > 0))
        run.steps()
        run.process.kill()
        run.end()
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    done = codescent(project, "train", "run.toml", *ENDLESS, "--resume=auto")
    assert done.returncode == 1
    assert "the last 2 starts of this job began at step 0 and saved no further step" in done.stderr
    monkeypatch.delenv("SLURM_RESTART_COUNT")  # a person may start it as often as he likes
    runs.append(run := Run(project, 1, resume=True))
    run.steps()


# Before the run begins


@contextlib.contextmanager
def preparing(project: Path) -> Iterator[None]:
    """Another process prepares the same dataset: it holds the lock of the hidden folder."""
    with contextlib.chdir(project):
        hidden = project / make_request("corpus.txt", "byte", 0.1, "text", None).partial_folder(Path("datasets"))
    hidden.mkdir(parents=True, exist_ok=True)
    handle = os.open(hidden, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(handle)


def waits(run: Run) -> None:
    """Wait until the run waits for that process. A rank of an agent says so in its log."""
    end, said = time.monotonic() + TIMEOUT_S, "another process is preparing this dataset in "
    while said not in run.err:
        assert time.monotonic() < end, run.err
        assert run.process.stderr is not None
        if select.select([run.process.stderr], [], [], 0.1)[0]:
            run.err += os.read(run.process.stderr.fileno(), 4096).decode()
        if any(said in log.read_text() for log in run.folder.glob("tmp/codescent-ranks-*/rank-0.log")):
            return


def ask(run: Run) -> tuple[int, str]:
    """As SLURM asks. Returns exit code and standard error."""
    waits(run)
    for number in (signal.SIGUSR1, signal.SIGCONT, signal.SIGUSR1):
        with contextlib.suppress(ProcessLookupError):
            run.process.send_signal(number)
    code, _, err = run.end()
    return code, err


WORDS = [sys.executable, "-m", "codescent", "train", "run.toml", *ENDLESS, "--resume=auto"]
BEFORE = {
    "one process": WORDS,
    "local ranks": [*WORDS, "--ranks", "2"],
    "agent": [sys.executable, "-m", "codescent.launch.agent", "--ranks", "2", "--", *WORDS],
}


@pytest.mark.parametrize("by", ["one process", "local ranks", pytest.param("agent", marks=pytest.mark.slow)])
def test_a_signal_ends_the_preparation_of_data(project: Path, runs: list[Run], by: str) -> None:
    file, tmp = project / "code", project / "tmp"
    tmp.mkdir()
    with preparing(project):
        runs.append(run := Run(project, 1, BEFORE[by], CODESCENT_EXIT_FILE=str(file), TMPDIR=str(tmp)))
        code, err = ask(run)
    assert (code, file.read_text()) == (0, f"{LATER}\n"), err
    assert "codescent: SIGUSR1: stopped before the run began; what is prepared of the data stays\n" in err
    assert not (project / "runs").exists()
    runs.append(run := Run(project, 1, WORDS))
    run.steps()  # nothing hinders the next start


@pytest.mark.slow
def test_a_job_whose_preparation_never_ends_is_not_started_for_ever(project: Path, runs: list[Run]) -> None:
    counts = [{}, {"SLURM_RESTART_COUNT": "1"}]
    ends = []
    for count in counts:
        with preparing(project):
            runs.append(run := Run(project, 1, WORDS, SLURM_JOB_ID="7", **count))
            ends.append(ask(run))
    assert [code for code, _ in ends] == [LATER, 1]
    assert "error: the last 2 starts of this job ended before the run began: it is not started again" in ends[1][1]
    with preparing(project):
        runs.append(run := Run(project, 1, WORDS, SLURM_JOB_ID="8"))  # a new submission
        assert ask(run)[0] == LATER
    runs.append(run := Run(project, 1, WORDS, SLURM_JOB_ID="8", SLURM_RESTART_COUNT="1"))
    run.steps()


def test_a_time_limit_ends_the_preparation_of_data(project: Path, runs: list[Run]) -> None:
    runs.append(run := Run(project, 1, WORDS, CODESCENT_STOP_AT=str(int(time.time()))))
    code, _, err = run.end()
    assert code == LATER, err
    assert re.search(
        r"codescent: the time limit of the job \(CODESCENT_STOP_AT=.*\): stopped before the run began", err
    )
    assert not (project / "runs").exists()


def test_what_is_ready_takes_a_step_before_the_exit_code_is_in_a_file_that_can_be_written(
    project: Path, runs: list[Run]
) -> None:
    """Otherwise the process ends with the code itself: no script would learn of it."""
    prepare(project)
    env = {"CODESCENT_STOP_AT": str(int(time.time())), "CODESCENT_EXIT_FILE": str(project / "absent" / "code")}
    runs.append(run := Run(project, 1, WORDS, **env))
    code, out, err = run.end()
    assert (code, "stopped at step 1 by the time limit" in out) == (LATER, True), err
    assert re.search(r"codescent: CODESCENT_EXIT_FILE: .*absent/code: No such file or directory", err)


ENDING = """
import time
from pathlib import Path
def slow(kind, data):
    if kind == "end":
        time.sleep(3)
        Path("written").touch()
"""


def test_ranks_end_together_where_the_launcher_ends_all_when_one_has_ended(project: Path) -> None:
    """As mpirun does, and srun with --kill-on-bad-exit: here the others are killed at once."""
    prepare(project)
    (project / "logs_slowly.py").write_text(ENDING)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    env = environment(CODESCENT_STOP_AT=str(int(time.time())), CODESCENT_TOKEN="a secret", PYTHONPATH=path(project))
    ranks = []
    for rank in range(2):
        values = (rank, rank, 2, 2, "127.0.0.1", port)
        place = dict(zip(TORCHRUN_SET, map(str, values), strict=True))
        words = [*WORDS, "log.to=logs_slowly:slow"]
        ranks.append(subprocess.Popen(words, cwd=project, env={**env, **place}, stdout=-1, stderr=-1, text=True))
    try:
        end = time.monotonic() + TIMEOUT_S
        while all(rank.poll() is None for rank in ranks):
            assert time.monotonic() < end
            time.sleep(0.002)
    finally:
        for one in ranks:
            one.kill()
    said = [one.communicate() for one in ranks]
    assert LATER in [one.returncode for one in ranks], said
    assert (project / "written").exists()
    assert "saved in runs/endless/checkpoints" in said[0][0]


@pytest.mark.parametrize(("words", "ends"), [(("train.num_steps=0",), 2), ((), -signal.SIGTERM)])
def test_a_rank_that_is_ended_while_it_begins_still_refuses_a_wrong_config(
    project: Path, words: tuple[str, ...], ends: int
) -> None:
    """As by srun --kill-on-bad-exit, when a faster rank has refused it: the largest code of all counts there."""
    env = environment(CODESCENT_EXIT_FILE=str(project / "code"), CODESCENT_TOKEN="a secret")
    place = dict(zip(TORCHRUN_SET, ("1", "1", "2", "2", "127.0.0.1", "29400"), strict=True))
    rank = subprocess.Popen([*WORDS, *words], cwd=project, env={**env, **place}, stdout=-1, stderr=-1, text=True)
    mask, end = 1 << (signal.SIGTERM - 1), time.monotonic() + TIMEOUT_S
    while not int(re.findall(r"SigBlk:\s*(\w+)", Path(f"/proc/{rank.pid}/status").read_text())[0], 16) & mask:
        assert time.monotonic() < end
        time.sleep(0.001)
    rank.send_signal(signal.SIGTERM)
    _, err = rank.communicate(timeout=TIMEOUT_S)
    assert rank.returncode == ends, err
    assert ("train.num_steps" in err) == (ends == 2)
    assert (project / "code").exists() == (ends == 2)
    if ends == 2:  # the script takes this code, whatever the launcher says
        assert (project / "code").read_text() == "2\n"
        env["CODESCENT_STOP_AT"] = str(int(time.time()))
        done = subprocess.run(
            WORDS, cwd=project, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        assert (done.returncode, (project / "code").read_text()) == (0, "75\n"), done.stderr


def path(*folders: Path) -> str:
    """PYTHONPATH, with these folders first."""
    return os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])


def test_a_time_that_is_none_is_refused(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CODESCENT_STOP_AT", "soon")
    done = codescent(project, "train", "run.toml")
    assert done.returncode == 2
    assert 'error: environment: CODESCENT_STOP_AT: given "soon"; must be seconds since 1970' in done.stderr
    assert not (project / "runs").exists()


def test_the_time_is_that_of_the_script_else_of_slurm() -> None:
    assert stop_at({}) == float("inf")
    assert stop_at({"SLURM_JOB_END_TIME": "1000"}) == 1000 - GRACE_S
    assert stop_at({"SLURM_JOB_END_TIME": "1000", "CODESCENT_STOP_AT": "900"}) == 900
    assert stop_at({"SLURM_JOB_END_TIME": "1000", "CODESCENT_STOP_AT": ""}) == 1000 - GRACE_S


NOW, LATER_S, OLD = (str(round(time.time() + more_s)) for more_s in (0, 3_600, -OLD_S - 3_600))
OF_A_JOB = {"SLURM_JOB_ID": "7"}


@pytest.mark.parametrize(
    ("env", "why"),
    [
        ({"SLURM_JOB_END_TIME": LATER_S, **OF_A_JOB}, ""),
        ({"SLURM_JOB_END_TIME": LATER_S, "SLURM_JOBID": "7"}, ""),  # as older versions call it
        ({"SLURM_JOB_END_TIME": NOW, **OF_A_JOB}, "is past, so it is of a job that has ended"),
        ({"SLURM_JOB_END_TIME": LATER_S}, "there is no SLURM_JOB_ID"),
        ({"SLURM_JOB_END_TIME": "Unknown", **OF_A_JOB}, "it is no time in seconds since 1970"),
        ({"SLURM_JOB_END_TIME": "\u00b2" * 50, **OF_A_JOB}, "it is no time in seconds since 1970"),
        ({"SLURM_JOB_END_TIME": "9" * 18, **OF_A_JOB}, ""),
        ({"CODESCENT_STOP_AT": NOW}, ""),  # the run takes a step, and saves
        ({"CODESCENT_STOP_AT": OLD}, "is past for more than a day"),
        ({"CODESCENT_STOP_AT": OLD, "SLURM_JOB_END_TIME": NOW}, "is past for more than a day"),
        ({"CODESCENT_STOP_AT": LATER_S, "SLURM_JOB_END_TIME": "Unknown"}, ""),  # the first decides
    ],
)
def test_a_limit_of_another_job_is_ignored_with_a_line(env: dict[str, str], why: str) -> None:
    left = dict(env)
    said = forget_others(left)
    assert bool(said) == bool(why), said
    if why:
        name = next(iter(env))
        assert said[0].startswith(f"{name}={env[name][:40]}")
        assert why in said[0]
        assert name not in left
        assert stop_at(left) == float("inf")
    else:
        assert left == env


def test_a_run_in_the_shell_of_an_ended_job_does_all_its_steps(
    project: Path, runs: list[Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shell is that of tmux, or of an editor's server, which was started in the job."""
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1700000000")
    done = codescent(project, "train", "run.toml", "train.num_steps=3", "--ranks", "2")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("codescent: SLURM_JOB_END_TIME=1700000000 is ignored: this time, 2023-11-14 ") == 1
    assert "stopped" not in done.stdout


def test_exit_codes_of_stops() -> None:
    codes = {number: exit_code_of(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)}
    assert list(codes.values()) == [130, 143, 129, 75]
