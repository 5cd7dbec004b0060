"""In: runs whose newest checkpoints are damaged. Out: with checkpoint.fall_back they go on from the one before.
Does not test which damage is found: test_checkpoint_damage does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from forker import Forker, Runs
from runs import assert_same

from codescent.record import RunFolder

WORDS = ("train.eval_every=0", "train.num_steps=8", "checkpoint.every=2", "checkpoint.keep_last=9")
FALLS_BACK = "checkpoint.fall_back=true"


@pytest.fixture(scope="module")
def runs(project: Path, forker: Forker) -> Runs:
    return Runs(project, forker, WORDS, ())


def folders(run: RunFolder) -> list[str]:
    return sorted(path.name for path in run.checkpoints.iterdir())


def flip(run: RunFolder, step: int) -> None:
    """One bit in the middle of the last file of tensors: with two ranks, that of rank 1."""
    file = max((run.checkpoints / f"step_{step:08d}").glob("rank_*"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def cut(run: RunFolder, step: int) -> None:
    file = run.checkpoints / f"step_{step:08d}" / "manifest.json"
    file.write_bytes(file.read_bytes()[:-9])


def remove(run: RunFolder, step: int) -> None:
    min((run.checkpoints / f"step_{step:08d}").glob("rank_*")).unlink()


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("damage", "ranks"), [(flip, 2), (cut, 2), (remove, 1)])
def test_a_damaged_one_is_set_aside_and_the_one_before_is_taken(
    runs: Runs, damage: Callable[[RunFolder, int], None], ranks: int
) -> None:
    """Fault: damage ends an unattended run; or it is deleted, untold, or taken by some ranks; or the run differs."""
    run = runs.run(ranks, FALLS_BACK)
    expected = run.read_metrics()
    for step in (6, 8):
        damage(run, step)
    again = runs.run(ranks, FALLS_BACK, resume=True)
    assert [row["train_loss"] for row in again.read_metrics()] == [row["train_loss"] for row in expected]
    assert folders(again) == [
        "damaged_step_00000006",
        "damaged_step_00000008",
        *(f"step_0000000{n}" for n in (2, 4, 6, 8)),
    ]
    aside = [event for event in again.read_events() if event["kind"] == "checkpoint_set_aside"]
    assert [event["step"] for event in aside] == [8, 6]
    assert all(event["problems"] and (runs.project / event["kept_as"]).is_dir() for event in aside)
    (resumed,) = [event for event in again.read_events() if event["kind"] == "resume"]
    assert resumed["step"] == 4


@pytest.mark.timeout(120)
def test_by_hand_it_is_refused_with_the_way_back(runs: Runs) -> None:
    """Fault: without the key a resume passes over a damaged checkpoint in silence."""
    assert runs.start(1, "train.num_steps=9", fault="killed 9").codes == [-9]
    run = runs.last()
    flip(run, 8)
    words = [*WORDS, "train.num_steps=9", f"run.name={run.path.name}"]
    done = runs.forker.run(runs.project, 1, words, resume=True)
    assert done.codes == [2], done.said
    assert "delete that folder to go back to step 6" in done.said
    assert "step_00000008" in folders(run)


@pytest.mark.timeout(120)
def test_where_none_is_left_nothing_begins_anew(runs: Runs) -> None:
    """Fault: a run whose checkpoints are all damaged begins at step 0, and its steps are lost in silence."""
    run = runs.run(2, "checkpoint.every=4", "train.num_steps=8")
    for step in (4, 8):
        flip(run, step)
    done = runs.forker.run(runs.project, 2, [*WORDS, f"run.name={run.path.name}", FALLS_BACK], resume=True)
    assert done.codes == [2, 2], done.said
    assert "its bytes were changed" in done.said
    assert "there is no older checkpoint" in done.said
    assert folders(run) == ["damaged_step_00000008", "step_00000004"]


@pytest.mark.timeout(120)
def test_a_second_one_of_the_same_step_has_another_name(runs: Runs) -> None:
    """Fault: what was set aside before is replaced by what is set aside now."""
    run = runs.run(1, FALLS_BACK)
    before = runs.last().read_metrics()
    for _ in range(2):
        flip(run, 8)
        runs.run(1, FALLS_BACK, resume=True)
    assert {"damaged_step_00000008", "damaged_step_00000008_2", "step_00000008"} <= set(folders(run))
    assert_same(run, runs.last(), 0.0)
    assert len(before) == 8
