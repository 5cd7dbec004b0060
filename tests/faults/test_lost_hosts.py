"""In: runs of two agents with survive.on_loss. Out: they go on when ranks, agents or hosts are lost, as one alone does.
The hosts are agents of this machine (agents.py). Who takes which rank is tested in test_decider.py, without processes."""

from __future__ import annotations

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
