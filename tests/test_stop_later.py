"""In: runs that a scheduler asks to save, by a signal or its time limit. Out: exit code 75; the next start goes on.
Does not use a scheduler: the signals and variables are those that SLURM sends."""

from __future__ import annotations

import contextlib
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from runs import codescent, make_project
from test_running import ENDLESS, Run

from codescent.base.errors import UserError
from codescent.base.stopping import GRACE_S, LATER, exit_code_of, stop_at
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


@pytest.mark.parametrize("ranks", [1, 2])
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


def prepare(project: Path) -> None:
    """Prepare the data of the runs."""
    done = codescent(project, "data", "corpus.txt", "--tokenizer", "byte")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_saves_before_the_time_is_over(
    project: Path, monkeypatch: pytest.MonkeyPatch, runs: list[Run], ranks: int
) -> None:
    prepare(project)
    monkeypatch.setenv("CODESCENT_STOP_AT", str(int(time.time())))
    runs.append(run := Run(project, ranks))
    code, out, err = run.end()
    assert code == LATER, err
    assert "stopped at step 1 by the time limit of the job; saved in" in out
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
    with pytest.raises(UserError, match="SLURM_JOB_END_TIME"):
        stop_at({"SLURM_JOB_END_TIME": "1e3"})


def test_exit_codes_of_stops() -> None:
    codes = {number: exit_code_of(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)}
    assert list(codes.values()) == [130, 143, 129, 75]
