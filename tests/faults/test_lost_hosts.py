"""In: runs of two agents with survive.on_loss. Out: they go on when ranks, agents or hosts are lost, as one alone does.
The hosts are agents of this machine (agents.py). test_decider.py tests who takes which rank, without processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from agents import FP64, Agents
from runs import codescent, losses
from surviving import WORDS

from codescent.record import RunFolder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


def is_like_a_run_alone(run: Agents, *words: str) -> None:
    """Each step is there once, with the loss of a run that nobody disturbed."""
    alone = codescent(run.place, "train", *WORDS, *FP64, *words, "run.name=alone")
    assert alone.returncode == 0, alone.stderr
    expected = losses(RunFolder.open(run.place / "runs" / "alone"))
    assert losses(RunFolder.open(run.folder)) == pytest.approx(expected, rel=1e-9), run.all_said()


@pytest.mark.parametrize(("on_loss", "host"), [("restart", 1), ("shrink", 1), ("restart", 0)])
def test_f2_a_rank_of_two_hosts_is_started_again(tmp_path: Path, stack: ExitStack, on_loss: str, host: int) -> None:
    """Fault: only the ranks of its host hear of a loss; or the other agent ends its ranks; or rank 0 leaves host 0."""
    run = Agents(tmp_path, on_loss)
    stack.callback(run.close)
    run.until(lambda: run.rows() > 12)
    lives = [pid for number in range(2) for pid in run.pids(number)]
    killed = run.pids(host)[0]
    run.kill(host)
    run.until(lambda: bool(run.events("resume")))
    assert sorted({*lives} - {killed}) == sorted({*lives} & {*run.pids(0), *run.pids(1)}), "the others stay"
    assert run.end() == [0, 0], run.all_said()
    is_like_a_run_alone(run)
    (crash,) = run.events("crash")
    assert (crash["rank"], crash["process"]) == (2 * host, killed)


def test_f8_a_host_is_lost_and_comes_back(tmp_path: Path, stack: ExitStack) -> None:
    """Fault: the others wait for a host that is gone; a host that comes back never joins; a step is there twice."""
    words = ("train.num_steps=300", "checkpoint.every=50", "log.every=20")
    run = Agents(tmp_path, "shrink", *words)
    stack.callback(run.close)
    run.until(lambda: run.rows() > 12)
    run.lose(1)
    run.until(lambda: bool(run.events("resume")))
    rows = run.rows()
    run.until(lambda: run.rows() > rows + 5)
    run.hosts[1] = run.start(1)
    run.until(lambda: any(event.get("ranks") == 4 for event in run.events("regroup")) or len(run.events("resume")) > 1)
    assert run.end() == [0, 0], run.all_said()
    assert "is lost: its agent has ended" in run.said[0].read_text()
    is_like_a_run_alone(run, *words)
    assert {event["rank"] for event in run.events("crash")} == {2, 3}


def test_spares_of_another_host_take_the_places_of_a_lost_one(tmp_path: Path, stack: ExitStack) -> None:
    """Fault: with restart the run ends although enough processes wait; or the agent that was lost ends the others."""
    run = Agents(tmp_path, "restart", count=1, spares=(1, 0))
    stack.callback(run.close)
    run.until(lambda: run.rows() > 12)
    run.lose(1)
    run.until(lambda: bool(run.events("resume")))
    run.end()
    assert run.hosts[0].returncode == 0, run.all_said()
    is_like_a_run_alone(run)


def test_too_few_spares_end_the_run_with_the_reason(tmp_path: Path, stack: ExitStack) -> None:
    """Fault: the others wait for a host for ever, or end without saying which one was lost."""
    run = Agents(tmp_path, "restart", count=1)
    stack.callback(run.close)
    run.until(lambda: run.rows() > 4)
    run.lose(1)
    run.end()
    assert run.hosts[0].returncode == 1, run.all_said()
    assert "is lost, and 1 processes are left for 2 ranks; more survive.spares" in run.said[0].read_text()


def test_f4_host_0_is_lost(tmp_path: Path, stack: ExitStack) -> None:
    """Fault: the agents of the other hosts wait for host 0 for ever, or their ranks stay."""
    run = Agents(tmp_path, "shrink", count=1)
    stack.callback(run.close)
    run.until(lambda: run.rows() > 4)
    (pid,) = run.pids(1)
    run.lose(0)
    run.end(within_s=60)
    assert run.hosts[1].returncode == 1, run.all_said()
    assert "the run ends here: the agent of host 0, which has rank 0, has not answered" in run.said[1].read_text()
    assert not Path(f"/proc/{pid}").exists()


def test_a_host_that_stands_still_is_lost_and_ends_by_itself(tmp_path: Path, stack: ExitStack) -> None:
    """Fault: ranks whose agent is stopped live on, and keep the others from meeting; or the agent goes on later."""
    run = Agents(tmp_path, "shrink", "train.num_steps=400", count=1)
    stack.callback(run.close)
    run.until(lambda: run.rows() > 12)
    os.kill(run.hosts[1].pid, signal.SIGSTOP)
    try:
        run.until(lambda: bool(run.events("resume")))
        rows = run.rows()
        run.until(lambda: run.rows() > rows + 5)
    finally:
        os.kill(run.hosts[1].pid, signal.SIGCONT)
    run.end()
    assert [one.returncode for one in run.hosts] == [0, 1], run.all_said()
    assert "is lost: it was silent for 12 s" in run.said[0].read_text()
    said = run.said[1].read_text()
    assert "has taken this host for lost" in said or "which has rank 0, has not answered for" in said
