"""In: asynchronous runs whose ranks die at the wrong moment, by kill -9. Out: one plain line, no hang, a run to resume.
Does not test workers without which the run goes on (test_parameter_server_faults does)."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from runs import called, start
from test_parameter_server_faults import rank_of
from test_train_resume import wait_for_step

from codescent.base.progress import PROGRESS_FD, Pages
from codescent.launch.roles import Roles
from codescent.record import RunFolder

ASYNCHRONOUS = ("train.precision=fp64", "parallel.servers=1", "parallel.updates=asynchronous")
LONG = ("train.num_steps=60", "train.eval_every=0", "checkpoint.every=10", "optimizer.decay_steps=60")
Kill = Callable[[subprocess.Popen[str], Path], None]


def ended(project: Path, name: str, ranks: int, kill: Kill, *words: str) -> str:
    """What a run says that ends by SIGKILL of some of its ranks. It is resumed, and ends well."""
    size = f"train.global_batch_size={6 * (ranks - 1)}"
    process = start(
        project, "train", "run.toml", f"run.name={name}", *ASYNCHRONOUS, size, *words, "--ranks", str(ranks)
    )
    run = project / "runs" / name
    try:
        kill(process, run)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 137, said
    done = called(project, "train", "--resume", str(run))
    assert done.returncode == 0, done.stderr
    assert "resume" in [event["kind"] for event in RunFolder.open(run).read_events()]
    return said


def line_of(said: str, project: Path, name: str) -> str:
    """The line that says why the run has ended, without how to go on."""
    ending = f"; to go on from its last checkpoint: codescent train --resume {project / 'runs' / name}"
    shorter = ending.replace(f"{project}/", "")
    (line,) = (one for one in said.splitlines() if "the run has ended" in one)
    assert line.endswith((ending, shorter))
    return line.removesuffix(ending).removesuffix(shorter)


def pages_of(process: psutil.Process, ranks: int = 4) -> Pages:
    """The memory in which so many ranks write their progress, as this rank has it."""
    descriptor = os.open(f"/proc/{process.pid}/fd/{process.environ()[PROGRESS_FD]}", os.O_RDWR)
    try:
        return Pages(descriptor, ranks)
    finally:
        os.close(descriptor)


def stopped_in_a_meeting(process: psutil.Process, rank: int) -> int:
    """Stop a rank while it meets the others. Returns the step; 0: it did not meet them any more, and goes on."""
    pages, end_s = pages_of(process), time.monotonic() + 30
    while not pages.read(rank).meets:
        assert time.monotonic() < end_s
    process.send_signal(signal.SIGSTOP)
    while process.status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < end_s
    if not (step := pages.read(rank).meets):
        process.send_signal(signal.SIGCONT)
    return step


@pytest.mark.parametrize(
    ("rank", "living", "met", "why"),
    [
        (0, {2}, False, "no worker is left"),
        (1, {2}, True, "no worker is left"),
        (0, {1, 2}, False, "rank 0 has died, and only rank 0 writes the run folder"),
        (1, {0, 2}, True, "rank 1 has died while all ranks validated or saved"),
        (1, {0, 2}, False, "rank 1 has died, and this run needs all its workers"),
        (2, {0, 1}, False, "server 0 has died, and with it its part of the weights"),
    ],
)
def test_why_a_death_ends_a_run(rank: int, living: set[int], met: bool, why: str) -> None:
    roles = Roles({2: "server 0"}, frozenset({1}), "codescent train --resume runs/one")
    said = f"{why}: the run has ended with exit code 137; to go on from its last checkpoint: {roles.resume}"
    assert roles.over(rank, 137, living, met=met) == said
    assert not Roles().over(rank, 137, living, met=met)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_ends_when_no_worker_is_left(project: Path) -> None:
    """The first death is survived. Rank 0 is the last worker, because only rank 0 writes the run folder."""

    def kill(process: subprocess.Popen[str], run: Path) -> None:
        wait_for_step(process, run, 12)
        rank_of(process, 1).send_signal(signal.SIGKILL)
        wait_for_step(process, run, 32)
        rank_of(process, 0).send_signal(signal.SIGKILL)

    said = ended(project, "none-left", 3, kill, *LONG)
    assert "rank 1 of 3 (a worker, pid" in said
    assert line_of(said, project, "none-left") == "codescent: no worker is left: the run has ended with exit code 137"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_rank_0_dies(project: Path) -> None:
    def kill(process: subprocess.Popen[str], run: Path) -> None:
        wait_for_step(process, run, 12)
        rank_of(process, 0).send_signal(signal.SIGKILL)

    said = ended(project, "first", 4, kill, *LONG)
    why = "codescent: rank 0 has died, and only rank 0 writes the run folder: the run has ended with exit code 137"
    assert line_of(said, project, "first") == why


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_worker_dies_while_all_validate(project: Path) -> None:
    """Rank 2 is stopped in the midst of a meeting, so rank 1 waits there for it. Then rank 1 dies."""

    def kill(process: subprocess.Popen[str], run: Path) -> None:
        wait_for_step(process, run, 12)
        one, two = rank_of(process, 1), rank_of(process, 2)
        while not (step := stopped_in_a_meeting(two, 2)):
            assert process.poll() is None
        while pages_of(one).read(1).meets != step:
            assert process.poll() is None
        one.send_signal(signal.SIGKILL)
        two.send_signal(signal.SIGCONT)

    said = ended(project, "validates", 4, kill, *LONG, "train.eval_every=10")
    why = "codescent: rank 1 has died while all ranks validated or saved: the run has ended with exit code 137"
    assert line_of(said, project, "validates") == why
