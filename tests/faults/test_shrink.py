"""In: runs with survive.on_loss = "shrink", whose ranks are killed. Out: they go on, with the losses of a run alone.
Which layout is taken is tested in test_shrunk.py, and who takes which rank in test_places.py, without processes."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from runs import codescent, losses
from surviving import WORDS, Started

from codescent.record import RunFolder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

FP64 = ("train.precision=fp64", "model.num_heads=2", "model.num_layers=2", "survive.on_loss=shrink")
MEMORY = "resumed from the memory of the ranks at step"


def shrunk(folder: Path, layout: str, killed: int) -> tuple[Started, str]:
    """A run on four ranks that has lost one, and has ended with the losses of a run alone. And what it printed."""
    run = Started(folder, 4, *FP64, *layout.split())
    run.until(lambda: run.rows() > 12)
    run.kill(killed)
    run.until(lambda: len(run.events("resume")) > 0)
    code, said = run.end()
    assert code == 0, said
    alone = codescent(folder, "train", *WORDS, *FP64[:3], "run.name=alone")
    assert alone.returncode == 0, alone.stderr
    expected = losses(RunFolder.open(folder / "runs" / "alone"))
    assert losses(RunFolder.open(run.folder)) == pytest.approx(expected, rel=1e-9), said
    return run, said


@pytest.mark.parametrize(
    ("layout", "killed"),
    [
        ("parallel.dp_replicate=4", 2),
        ("parallel.dp_replicate=4", 0),
        ("parallel.dp_replicate=2 parallel.dp_shard=2", 3),
        ("parallel.dp_replicate=2 parallel.tp=2", 1),
        ("parallel.dp_replicate=2 parallel.pp=2", 2),
    ],
)
def test_f2_copies_lose_no_step(tmp_path: Path, layout: str, killed: int) -> None:
    """Fault: survivors read the disk although they hold every tensor; or take the lost step twice, or not at all."""
    run, said = shrunk(tmp_path, layout, killed)
    assert MEMORY in said
    (crash,) = run.events("crash")
    first = run.events("resume")[0]
    step = int(str(crash["step"]))
    assert step - 2 <= int(str(first["step"])) <= step, "the step under way, or the one before, whose update came"


def test_parts_that_are_gone_come_from_the_disk(tmp_path: Path) -> None:
    """Fault: with dp_shard alone the lost part is taken for zeros, or the run ends."""
    run, said = shrunk(tmp_path, "parallel.dp_shard=4", 1)
    assert "is not whole in memory" in said
    assert int(str(run.events("resume")[0]["step"])) % 5 == 0
    ranks = [int(str(event["ranks"])) for event in run.events("resume") if "ranks" in event]
    assert not ranks or min(ranks) < 4


@pytest.mark.parametrize("layout", ["parallel.dp_replicate=3", "parallel.dp_shard=3"])
def test_f8_grows_again(tmp_path: Path, layout: str) -> None:
    """Fault: the rank that is started again never joins; the step at which it does is done twice; or all read a
    checkpoint that is saved for it, although the others can send it its part. No event says what fewer ranks change. A
    logger takes a loss for the end."""
    steps = "train.num_steps=300"
    run = Started(tmp_path, 3, *FP64, layout, steps, "checkpoint.every=50")
    run.until(lambda: run.rows() > 12)
    run.kill(1)
    run.until(lambda: bool(run.events("regroup")))
    run.until(lambda: len(run.events("resume")) > 1)
    code, said = run.end()
    assert code == 0, said
    assert "with 2 of 3 ranks" in said
    told = " ".join(str(event["text"]) for event in run.events("note"))
    assert "train.microbatch_size: 3 instead of 4" in told or "as much of weights" in told
    assert said.count(f"{MEMORY} {run.events('regroup')[0]['step']}") == 1, said
    assert (tmp_path / "ends").read_text().split("\n") == ["None True", "None True", "None False", ""]
    saved = [int(str(event["step"])) for event in run.events("checkpoint")]
    assert not [step for step in saved if step % 10], "due ones alone, and the best ones"
    assert [row["step"] for row in RunFolder.open(run.folder).read_metrics()] == list(range(1, 301))
    alone = codescent(tmp_path, "train", *WORDS, *FP64[:3], steps, "run.name=alone")
    assert alone.returncode == 0, alone.stderr
    expected = losses(RunFolder.open(tmp_path / "runs" / "alone"))
    assert losses(RunFolder.open(run.folder)) == pytest.approx(expected, rel=1e-9), said


def test_a_stop_while_ranks_meet_saves_what_is_in_memory(tmp_path: Path) -> None:
    """Fault: a scheduler's SIGTERM ends the ranks between a loss and their next step, and the steps since the last
    checkpoint are gone; or they wait for one that the signal has ended."""
    run = Started(tmp_path, 3, *FP64, "parallel.dp_replicate=3", "checkpoint.every=1000", "train.eval_every=0")
    run.until(lambda: run.rows() > 12)
    run.kill(1)
    run.until(lambda: bool(run.events("crash")))
    time.sleep(0.1)  # the launcher calls the others
    run.process.terminate()
    code, said = run.end()
    assert code == 128 + signal.SIGTERM, said
    (stop,) = run.events("stop")
    assert int(str(stop["step"])) >= int(str(run.events("crash")[0]["step"])), said
    assert [event["step"] for event in run.events("checkpoint")] == [stop["step"]]


def test_nothing_to_shrink_to_is_refused(tmp_path: Path) -> None:
    """Fault: a run whose batch no smaller number of ranks can share begins, and ends at the first loss."""
    run = Started(tmp_path, 1, "survive.on_loss=shrink")
    code, said = run.end()
    assert code == 2
    assert 'error: survive.on_loss = "shrink": there is nothing to shrink to: the run has one rank' in said
