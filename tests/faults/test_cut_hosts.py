"""In: runs of three hosts with survive.on_loss, whose links are cut. Out: who goes on, with the losses of a run alone.
The hosts are network namespaces. test_lost_hosts.py kills agents and ranks; test_links.py has no policy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from host_agents import Agents
from host_ranks import hosts, until
from runs import losses, make_project, train

from codescent.record import RunFolder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SLOW_STEPS = """
import time
from pathlib import Path

def slow(kind, data):
    if kind == "metrics" and not Path("fast").exists():
        time.sleep(0.1)
"""
WORDS = ("train.global_batch_size=6", "model.hidden_dim=32", "model.num_layers=2", "model.num_heads=2", "log.every=50",
         "train.eval_every=0", "train.precision=fp64", "checkpoint.every=50", "train.num_steps=700",
         "optimizer.learning_rate=1e-4")  # fmt: skip
OWN = ("log.to=own_logger:slow",)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    if reason := hosts.missing():
        pytest.skip(reason)
    make_project(tmp_path)
    (tmp_path / "own_logger.py").write_text(SLOW_STEPS)
    return tmp_path


@pytest.fixture
def made(folder: Path) -> Iterator[hosts.Hosts]:
    with hosts.Hosts(3) as found:
        yield found


def rows(run: Agents) -> int:
    file = run.run / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def goes_on(run: Agents, holds: Callable[[], bool]) -> None:
    """Wait until something holds, while the agent of host 0 lives."""

    def happens() -> bool:
        assert run.agents[0].poll() is None, run.said()
        return holds()

    until(happens)


def is_like_a_run_alone(run: Agents, folder: Path) -> None:
    expected = losses(train(folder, "alone", *WORDS))
    assert losses(RunFolder.open(run.run)) == pytest.approx(expected, rel=1e-9), run.said()


def test_f6_a_host_that_was_cut_off_comes_back(made: hosts.Hosts, folder: Path) -> None:
    """Fault: both sides of a cut go on, and write one run; or the smaller one stays, so that its host cannot join."""
    with Agents(made, 3, folder, "cut", *WORDS, *OWN, on_loss="shrink") as run:
        goes_on(run, lambda: rows(run) > 20)
        began_s = time.monotonic()
        made.cut(2)
        goes_on(run, lambda: run.agents[2].poll() is not None)
        before = rows(run)
        goes_on(run, lambda: rows(run) > before + 5)
        print(f"the others go on {time.monotonic() - began_s:.1f} s after the cut")
        made.heal(2)
        run.agents[2] = run.start(2)
        goes_on(run, lambda: any(one["kind"] == "regroup" for one in RunFolder.open(run.run).read_events()))
        (folder / "fast").touch()
        assert run.end() == [0, 0, 0], run.said()
        assert "was silent for 12 s" in run.said()
        is_like_a_run_alone(run, folder)


def test_f5_a_cut_of_3_seconds_costs_no_step(made: hosts.Hosts, folder: Path) -> None:
    """Fault: a link that works again in time loses a host, or ends a run that would have gone on."""
    with Agents(made, 3, folder, "healed", *WORDS, *OWN, on_loss="shrink") as run:
        goes_on(run, lambda: rows(run) > 20)
        made.cut(1)
        time.sleep(3.0)
        made.heal(1)
        (folder / "fast").touch()
        assert run.end() == [0, 0, 0], run.said()
        assert "is lost" not in run.said()
        events = RunFolder.open(run.run).read_events()
        assert not [one for one in events if one["kind"] in ("resume", "regroup", "crash", "hang")]
        is_like_a_run_alone(run, folder)


def test_f6_the_others_of_a_first_host_that_is_cut_off_end(made: hosts.Hosts, folder: Path) -> None:
    """Fault: hosts without rank 0 wait for ever, or go on beside it; or host 0 waits for hosts that have ended."""
    with Agents(made, 3, folder, "first", *WORDS, *OWN, on_loss="shrink") as run:
        goes_on(run, lambda: rows(run) > 20)
        made.cut(0)
        until(lambda: all(agent.poll() is not None for agent in run.agents[1:]), 40.0)
        assert [agent.returncode for agent in run.agents[1:]] == [1, 1], run.said()
        assert run.said().count("the run ends here: the agent of host 0") == 2
        before = rows(run)
        goes_on(run, lambda: rows(run) > before + 5)
        (folder / "fast").touch()
        until(lambda: run.agents[0].poll() is not None)
        assert run.agents[0].returncode == 0, run.said()
        is_like_a_run_alone(run, folder)
