"""In: runs of which one batch has a loss and gradients that are far too large. Out: stopped, skipped, or gone back.
Does not test numbers that are not finite: test_not_finite does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from forker import Forker, Runs
from runs import assert_same, losses, make_project

from codescent.base.errors import UserError
from codescent.config.load import load
from codescent.config.survive import Survive
from codescent.data.order import AheadOrder, Sampler, batch_of
from codescent.record import RunFolder
from codescent.train.rolled_back import ahead_of
from codescent.train.spikes import Spikes

WORDS = (
    *("train.num_steps=16", "train.eval_every=0", "train.precision=fp64", "train.microbatch_size=4"),
    *("checkpoint.every=2", "checkpoint.keep_last=4", "survive.spike_window=5"),
)
SKIP, BACK = "survive.on_spike=skip", "survive.on_spike=rollback"
LAYOUTS = [(2, ()), (2, ("parallel.tp=2",)), (2, ("parallel.pp=2",)), (2, ("parallel.dp_shard=2",))]
QUICK = [(LAYOUTS[2], SKIP), (LAYOUTS[3], BACK)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, forker: Forker) -> Runs:
    project = tmp_path_factory.mktemp("spikes")
    make_project(project)
    return Runs(project, forker, WORDS, ())


def events(run: RunFolder, kind: str) -> list[dict[str, Any]]:
    return [event for event in run.read_events() if event["kind"] == kind]


def sums(loss: float, norm: float = 1.0) -> torch.Tensor:
    return torch.tensor([loss * 10, 0.0, norm**2], dtype=torch.float64)


def looking(**keys: Any) -> Spikes:
    spikes = Spikes(Survive(on_spike="skip", spike_window=5, **keys), {})
    spikes.losses = lambda: 10
    return spikes


def test_a_spike_is_far_above_the_median_of_the_steps_before() -> None:
    """Fault: one spike moves the limit, so that the next one passes; or noise and a falling loss are spikes."""
    spikes = looking(spike_factor=10.0)
    first = [3.0, 2.9, 3.1, 2.8, 3.0]
    assert all(spikes.accepts(sums(loss)) for loss in (100.0, *first))  # the window is not full before
    for _ in range(3):
        assert not spikes.accepts(sums(9.0))
    assert spikes.in_row == 3
    assert spikes.found is not None
    assert spikes.found.most_loss == pytest.approx(3.0 + 10 * 1.4826 * 0.1)
    assert "the loss 9 is above 4.483" in str(spikes.found)
    assert spikes.accepts(sums(4.4))
    assert spikes.found is None
    assert spikes.accepts(sums(0.1))
    assert not spikes.accepts(sums(2.0, norm=3.0))
    assert "norm of the gradients 3 is above" in str(spikes.found)


def test_a_checkpoint_keeps_what_decides_the_next_steps() -> None:
    """Fault: a resumed run has forgotten the steps before, and takes a spike for a usual step."""
    spikes = looking()
    for loss in (3.0, 1 / 3, 2.9, 3.1, 2.8):
        spikes.accepts(sums(loss))
    again = Spikes(spikes.keys, json.loads(json.dumps(spikes.state())))
    again.losses = spikes.losses
    for loss in (50.0, 3.0, 4.5, 50.0):
        assert again.accepts(sums(loss)) == spikes.accepts(sums(loss))
        assert again.state() == spikes.state()


def test_batches_are_left_out_from_the_right_step_on() -> None:
    """Fault: after two rollbacks a batch is taken that was left out before, or one is taken twice."""
    first = {"kind": "rollback", "to": 10, "ahead": 3}
    assert [batch_of(step, ahead_of([first])) for step in (8, 9, 10, 11)] == [8, 9, 13, 14]
    later, earlier = ({"kind": "rollback", "to": to, "ahead": 9} for to in (12, 6))
    assert ahead_of([first, later]) == [(10, 3), (12, 9)]
    assert ahead_of([first, earlier]) == [(6, 9)]
    order = Sampler(1, 100, 4)
    moved = AheadOrder(order, ahead_of([first, later]))
    for step in range(16):
        expected = order.indices_of_steps(batch_of(step, [(10, 3), (12, 9)]), 1, 1, 3)
        assert (moved.indices_of_steps(step, 1, 1, 3) == expected).all()
    assert (moved.indices_of_steps(8, 5, 0, 4)[4] == order.indices_of_steps(21, 1, 0, 4)).all()


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("ranks", "layout", "action"),
    [
        pytest.param(*layout, action, marks=[] if (layout, action) in QUICK else pytest.mark.slow)
        for layout in LAYOUTS
        for action in (SKIP, BACK)
    ],
)
def test_all_ranks_of_any_layout_decide_alike(runs: Runs, ranks: int, layout: tuple[str, ...], action: str) -> None:
    """Fault: one rank updates where others do not; or a layout leaves out other batches."""
    expected = runs.run(1, action, fault="spike 9")
    run = runs.run(ranks, *layout, action, "train.check_every=1", fault="spike 9")
    assert_same(run, expected, 1e-9)
    for kind in ("spike", "rollback"):
        found = [[event.get(key) for key in ("step", "to", "ahead")] for event in events(run, kind)]
        assert found == [[event.get(key) for key in ("step", "to", "ahead")] for event in events(expected, kind)]
    (told,) = events(run, "spike")
    assert (told["step"], told["action"]) == (10, action.partition("=")[2])
    assert told["train_loss"] > 1000 > told["most_loss"]


@pytest.mark.timeout(120)
def test_a_skipped_spike_changes_no_weight(runs: Runs) -> None:
    """Fault: the update of a spike is applied, or its state moves."""
    run, sound = runs.run(1, SKIP, fault="spike 9"), runs.run(1)
    assert losses(run)[:9] == losses(sound)[:9]
    assert losses(run)[9] == pytest.approx(1000 * losses(sound)[9])
    assert losses(run)[10] != losses(sound)[10]
    stale = runs.run(1, "survive.on_spike=none", fault="spike 9")
    assert losses(run)[10] != losses(stale)[10]


@pytest.mark.timeout(120)
def test_a_run_stops_at_a_spike_and_saves_nothing_of_it(runs: Runs) -> None:
    """Fault: the run ends after the update, or says nothing that helps."""
    done = runs.start(2, "survive.on_spike=stop", fault="spike 9")
    assert done.codes == [1, 1], done.said
    assert "ended at step 10, which is not saved: a spike: the loss" in done.said
    run = runs.last()
    assert max(path.name for path in run.checkpoints.iterdir()) == "step_00000008"
    assert run.read_events()[-1]["kind"] == "failed"
    assert f"codescent train --resume runs/{run.path.name} survive.spike_factor=20" in done.said
    resumed = runs.run(2, "survive.on_spike=stop", "survive.spike_factor=1e9", resume=True, fault="spike 9")
    assert [row["step"] for row in resumed.read_metrics()] == list(range(1, 17))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("beside", ["false", "true"])
def test_a_run_that_goes_back_and_is_killed_takes_the_same_way(runs: Runs, beside: str) -> None:
    """Fault: a resumed run takes batches that were left out, or has other limits, or keeps steps that are undone."""
    words = (BACK, "survive.rollback_steps=3", "survive.skip_batches=2", f"checkpoint.asynchronous={beside}")
    alone = runs.run(2, *words, fault="spike 9")
    (back,) = events(alone, "rollback")
    assert (back["step"], back["to"], back["ahead"]) == (10, 6, 5)
    assert [row["step"] for row in alone.read_metrics()] == list(range(1, 17))
    done = runs.start(2, *words, fault="spike 9 killed 13")
    assert done.codes[-1] == -9
    assert len(events(runs.last(), "rollback")) == 1
    resumed = runs.run(2, *words, resume=True, fault="spike 9")
    assert_same(resumed, alone, 0.0)
    assert len(events(resumed, "rollback")) == 1


@pytest.mark.timeout(120)
def test_a_kill_between_record_and_removal_leaves_one_way(runs: Runs) -> None:
    """Fault: checkpoints of the steps that are undone are the newest ones, and the resumed run goes on from them."""
    words = (BACK, "survive.rollback_steps=3")
    alone = runs.run(1, *words, fault="spike 9")
    assert runs.start(1, *words, fault="spike 9 killed_in_rollback").codes == [-9]
    assert "step_00000008" in {path.name for path in runs.last().checkpoints.iterdir()}
    resumed = runs.run(1, *words, resume=True, fault="spike 9")
    assert_same(resumed, alone, 0.0)
    (again,) = events(resumed, "resume")
    assert again["step"] == 6


@pytest.mark.timeout(120)
def test_it_goes_back_in_a_run_folder_that_was_renamed(runs: Runs) -> None:
    """Fault: no checkpoint is seen at the old place, so the run begins anew, and all its steps are lost."""
    old = runs.project / "runs" / "old"
    done = runs.start(2, BACK, f"run.folder={old}", fault="spike 9 renamed 10 old")
    assert done.codes == [0, 0], done.said
    (back,) = events(RunFolder.open(old.with_name(f"{old.name}-moved")), "rollback")
    assert back["to"] == 8
    assert not old.exists()


@pytest.mark.timeout(120)
def test_a_damaged_checkpoint_is_passed_over_if_that_is_asked_for(tmp_path: Path, forker: Forker) -> None:
    """Fault: later checkpoints are deleted for one that cannot be loaded, and the run ends."""
    make_project(tmp_path)
    runs = Runs(tmp_path, forker, WORDS, ())
    run = runs.run(2, BACK, "checkpoint.fall_back=true", fault="spike 9 cut_checkpoint 10 8")
    (aside,), (back,) = events(run, "checkpoint_set_aside"), events(run, "rollback")
    assert (aside["step"], back["to"], back["ahead"]) == (8, 6, 4)
    assert [row["step"] for row in run.read_metrics()] == list(range(1, 17))


@pytest.mark.timeout(120)
def test_without_a_checkpoint_it_goes_back_to_the_beginning(runs: Runs) -> None:
    """Fault: a spike before the first checkpoint ends the run, or is applied."""
    words = (BACK, "checkpoint.every=50")
    run = runs.run(2, *words, fault="spike 9")
    (back,) = events(run, "rollback")
    assert (back["to"], back["ahead"]) == (0, 10)
    assert [row["step"] for row in run.read_metrics()] == list(range(1, 17))
    assert losses(run)[0] != losses(runs.run(2))[0]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_request_to_stop_at_a_spike_counts_after_the_rollback(runs: Runs, ranks: int) -> None:
    """Fault: the run says that it is saved at a step that is undone; or it goes on as if nobody had asked."""
    alone = runs.run(1, BACK, fault="spike 9")
    done = runs.start(ranks, BACK, fault="spike 9 asked_to_stop 10")
    assert done.codes == [143] * ranks, done.said
    (stopped,) = events(runs.last(), "stop")
    assert stopped["step"] == 9
    assert (runs.last().checkpoints / "step_00000009").exists()
    assert_same(runs.run(ranks, BACK, resume=True, fault="spike 9"), alone, 1e-9)


@pytest.mark.timeout(120)
def test_a_spike_after_a_step_that_was_skipped_ends_the_row(runs: Runs) -> None:
    """Fault: a finite step counts as skipped because it is a spike: it is not saved, and the run ends in vain."""
    run = runs.run(2, SKIP, "train.num_steps=10", fault="spike 9 infinite_loss 9")
    assert [event["step"] for event in events(run, "skipped_step")] == [9]
    assert [event["step"] for event in events(run, "spike")] == [10]
    assert events(run, "checkpoint")[-1]["step"] == 10


@pytest.mark.timeout(120)
def test_spikes_in_a_row_keep_the_checkpoint_before_their_cause(runs: Runs) -> None:
    """Fault: steps that are spikes seem to prove the weights, and the last good checkpoint is deleted."""
    words = (SKIP, "checkpoint.every=1", "checkpoint.keep_last=1", "train.num_steps=40")
    done = runs.start(1, *words, fault="ruined 9")
    assert done.codes == [1], done.said
    (failed,) = events(runs.last(), "failed")
    assert (failed["step"], failed["ruined_step"]) == (19, 9)
    assert "continue from step 8:" in done.said
    assert (runs.last().checkpoints / "step_00000008").exists()


@pytest.mark.timeout(120)
def test_a_loss_that_stays_high_ends_a_run_that_skips(runs: Runs) -> None:
    """Fault: every step is skipped for ever, and nobody is told."""
    words = (SKIP, "survive.spike_factor=1e-9", "optimizer.learning_rate=1e-12", "train.num_steps=60")
    done = runs.start(1, *words)
    assert done.codes == [1], done.said
    assert "spikes in a row: 10" in done.said


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ((BACK, "checkpoint.every=0"), "there is no checkpoint to go back to"),
        (
            (BACK, "survive.rollback_steps=30", "checkpoint.every=10", "train.num_steps=40"),
            "set checkpoint.keep_last to 4",
        ),
        (
            (BACK, "survive.rollback_steps=60", "checkpoint.every=10", "train.num_steps=60"),
            "no checkpoint can be so old; set it to less",
        ),
        ((SKIP, "parallel.average_every=4"), "ranks update without the loss of all"),
    ],
)
def test_what_a_spike_needs_is_asked_before(runs: Runs, words: tuple[str, ...], why: str) -> None:
    """Fault: a run finds out at its first spike that it has nothing to go back to."""
    with pytest.raises(UserError, match=why):
        load(runs.project / "run.toml", words)
