"""In: runs whose results are read a step late, as off the CPU. Out: the same rows, checkpoints and ends as at once.
Does not use a device: each step is computed when it is launched, and only its result is held back."""

from __future__ import annotations

import re

import pytest
import torch
from forker import Forker, Runs
from refused import config_of, planned
from runs import losses, make_project
from test_not_finite import DIVERGES

from codescent.checkpoint.checkpoints import read_tensors
from codescent.record import RunFolder
from codescent.record.ranks import PARTS
from codescent.train.dues import Dues

RARE = ("log.every=100", "train.eval_every=0", "train.check_every=0")
"""Nothing is due in the middle, so all results but the first and the last are late."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, forker: Forker) -> Runs:
    project = tmp_path_factory.mktemp("late")
    make_project(project)
    return Runs(project, forker, ("checkpoint.keep_last=9", "train.microbatch_size=2"), ())


def saved(run: RunFolder) -> dict[str, dict[str, torch.Tensor]]:
    return {folder.name: read_tensors(folder) for folder in sorted((run.path / "checkpoints").iterdir())}


def assert_bitwise(found: RunFolder, expected: RunFolder) -> None:
    """Rows, but for times and memory, events and checkpoints."""
    columns = ("step", "train_loss", "val_loss", "learning_rate", "grad_norm", "tokens")
    of_both = [[[str(row[name]) for name in columns] for row in run.read_metrics()] for run in (found, expected)]
    assert of_both[0] == of_both[1]
    kinds = [[(event["kind"], event.get("step")) for event in run.read_events()] for run in (found, expected)]
    assert kinds[0] == kinds[1]
    mine, theirs = saved(found), saved(expected)
    assert mine.keys() == theirs.keys()
    for name, tensors in mine.items():
        assert all(torch.equal(tensors[key], theirs[name][key]) for key in theirs[name]), name


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_rows_and_checkpoints_are_those_of_reading_at_once(runs: Runs, ranks: int) -> None:
    words = ("train.num_steps=17", "train.eval_every=7", "log.every=5", "checkpoint.every=6", "train.check_every=11")
    expected, found = (runs.run(ranks, *words, fault=fault) for fault in ("", "late"))
    assert_bitwise(found, expected)
    assert [row["step"] for row in found.iter_ranks()] == [s for s in (5, 10, 15, 17) for _ in range(ranks)]
    for row in [*found.iter_metrics(), *found.iter_ranks()]:
        assert sum(row[part] or 0.0 for part in PARTS) == pytest.approx(row["step_s"], rel=0.01)


def test_a_skipped_step_is_told_late_and_changes_nothing(runs: Runs) -> None:
    """The first skipped step is compared, the next good one goes on."""
    words = (*RARE, "train.num_steps=8")
    expected = runs.run(2, *words, fault="infinite_gradient")
    found = runs.run(2, *words, fault="late infinite_gradient")
    assert [event["step"] for event in found.read_events() if event["kind"] == "skipped_step"] == [3]
    assert_bitwise(found, expected)


def test_a_checkpoint_that_was_due_at_a_skipped_step_is_saved_at_the_next(runs: Runs) -> None:
    words = (*RARE, "train.num_steps=8", "checkpoint.every=3")
    assert list(saved(runs.run(1, *words, fault="late infinite_gradient"))) == [f"step_{step:08}" for step in (4, 6, 8)]


@pytest.mark.parametrize(
    ("every", "last"), [(100, 6), (5, 5)], ids=["at the step launched last", "read at once, it stops there"]
)
def test_a_request_to_stop_ends_all_ranks_at_one_step_that_is_saved(runs: Runs, every: int, last: int) -> None:
    """The last rank is asked in step 5."""
    words = ("train.num_steps=20", *RARE, f"log.every={every}")
    done = runs.start(2, *words, fault="late asked_to_stop 5")
    assert done.codes == [143, 143], done.said
    run = runs.last()
    assert [row["step"] for row in run.read_metrics()] == list(range(1, last + 1))
    assert list(saved(run)) == [f"step_{last:08}"]
    (stop,) = [event for event in run.read_events() if event["kind"] == "stop"]
    assert (stop["step"], stop["rank"]) == (last, 1)
    resumed = runs.run(2, *words, resume=True)
    assert [row["step"] for row in resumed.read_metrics()] == list(range(1, 21))
    assert losses(resumed) == losses(runs.run(2, *words))


def test_a_request_in_the_step_before_the_last_one_finishes_the_run(runs: Runs) -> None:
    run = runs.run(2, *RARE, "train.num_steps=6", fault="late asked_to_stop 5")
    assert [row["step"] for row in run.read_metrics()] == list(range(1, 7))
    assert run.read_events()[-1]["kind"] == "end"


def test_ten_skipped_steps_fail_and_name_the_same_step(runs: Runs) -> None:
    said = []
    for fault in ("", "late"):
        done = runs.start(2, *DIVERGES, *RARE, "checkpoint.every=5", fault=fault)
        assert done.codes == [1, 1], done.said
        run = runs.last()
        assert list(saved(run)) == ["step_00000005"]
        failed = run.read_events()[-1]
        assert failed["kind"] == "failed"
        (step,) = set(re.findall(r"ended at step (\d+), which is not saved", done.said))
        assert run.read_metrics()[-1]["step"] == int(step) == failed["step"]
        said.append((step, failed["reason"], failed["ruined_step"]))
    assert said[0] == said[1]


def test_a_result_is_needed_at_once_where_all_ranks_act() -> None:
    """Within a round a rank writes its own row only: the host need not wait for the device."""
    every = {
        "log.every": 10,
        "train.num_steps": 1000,
        "train.eval_every": 500,
        "train.check_every": 0,
        "checkpoint.every": 500,
    }
    apart = {**every, "parallel.dp_replicate": 2, "parallel.average_every": 100}
    for keys, expected in ((every, 10), (apart, 100)):
        dues = Dues(config_of(keys), planned(keys, 2).schedule)
        steps = [step for step in range(1, 1001) if dues.anything(step, 1000)]
        assert steps == list(range(expected, 1001, expected))
