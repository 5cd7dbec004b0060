"""In: runs whose validation loss falls and rises again. Out: the best checkpoint is kept; `train.stop_after` ends them.
Does not test which checkpoints are deleted: test_checkpoint does."""

from __future__ import annotations

import math
import random
import signal
from pathlib import Path
from typing import Any

import pytest
from forker import Forker
from runs import assert_same, called, losses, make_project

from codescent.checkpoint.checkpoints import Checkpoints
from codescent.config.load import load, shipped
from codescent.record import RunFolder

FALLS_AND_RISES = (
    "data.validation_fraction=0.5",
    "train.num_steps=30",
    "train.eval_every=4",
    "optimizer.schedule=constant",
    "checkpoint.every=0",
    "checkpoint.keep_last=1",
)
SLOW = pytest.mark.slow
STILL = ("optimizer.kind=sgd", "optimizer.learning_rate=1e-30", "train.eval_every=1")
"""Weights do not change, so no validation loss is lower than the first one."""
LAYOUTS = {
    "dp": ("parallel.dp_replicate=2",),
    "dp_shard": ("parallel.dp_shard=2",),
    "tp": ("parallel.tp=2",),
    "cp": ("parallel.cp=2",),
    "pp": ("parallel.pp=2", "train.microbatch_size=4"),
}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text that is mostly one letter, and ends with letters that are all as frequent."""
    folder = tmp_path_factory.mktemp("letters")
    make_project(folder)
    draw = random.Random(1)
    parts = (draw.choices("abcd", weights, k=1000) for weights in ((20, 1, 1, 1), (1, 1, 1, 1)))
    (folder / "corpus.txt").write_text("".join(letter for part in parts for letter in part))
    return folder


@pytest.fixture(scope="module")
def whole(project: Path, forker: Forker) -> RunFolder:
    """A run of one process, from beginning to end."""
    return forker.train(project, "whole", 1, *FALLS_AND_RISES)


def validated(run: RunFolder) -> dict[int, float]:
    """The validation loss of each step that has one."""
    return {row["step"]: row["val_loss"] for row in run.read_metrics() if row["val_loss"] is not None}


def falls(run: RunFolder) -> list[int]:
    """The steps whose validation loss is lower than all before."""
    found: dict[int, float] = {}
    for step, loss in validated(run).items():
        if loss < min(found.values(), default=math.inf):
            found[step] = loss
    return list(found)


def events(run: RunFolder, kind: str) -> list[dict[str, Any]]:
    return [event for event in run.read_events() if event["kind"] == kind]


def kept(run: RunFolder) -> list[int]:
    """The steps of the checkpoints that are there."""
    return sorted(int(path.name.removeprefix("step_")) for path in run.checkpoints.iterdir())


def test_the_best_is_kept_at_every_validation(whole: RunFolder) -> None:
    *before, best = falls(whole)
    assert len(before) >= 2
    assert best < 30
    saved = events(whole, "checkpoint")
    assert [event["step"] for event in saved] == [*before, best, 30]
    assert [event["best"] for event in saved] == [True] * len(falls(whole)) + [False]
    assert kept(whole) == [best, 30]
    found = Checkpoints(whole.checkpoints, 1, keep_best=True).best()
    assert found is not None
    assert (found.step, found.validation_loss) == (best, validated(whole)[best])


def test_without_keep_best_no_validation_saves(project: Path, forker: Forker, whole: RunFolder) -> None:
    run = forker.train(project, "not-best", 1, *FALLS_AND_RISES, "checkpoint.keep_best=false")
    assert [event["step"] for event in events(run, "checkpoint")] == [30]
    assert losses(run) == losses(whole)


@pytest.mark.parametrize("fault", [pytest.param("killed 23", marks=SLOW), "asked_to_stop 18", "asked_to_stop 16"])
def test_a_resumed_run_keeps_the_same_best(project: Path, forker: Forker, whole: RunFolder, fault: str) -> None:
    """What is saved after the resume is what the run without an interruption saves.

    No step is saved twice, except the best one with which a run stops: the second time with its validation loss.
    """
    assert falls(whole)[-1] == 16
    name = fault.replace(" ", "-")
    done = forker.run(project, 1, [f"run.name={name}", *FALLS_AND_RISES], fault=fault)
    assert done.codes == [-signal.SIGKILL if "killed" in fault else 128 + signal.SIGTERM]
    run = forker.train(project, name, 1, *FALLS_AND_RISES, resume=True)
    assert losses(run) == losses(whole)
    assert validated(run) == validated(whole)
    assert kept(run) == [16, 30]
    wanted = [*falls(whole), *([int(fault.split()[1])] if "stop" in fault else []), 30]
    assert [event["step"] for event in events(run, "checkpoint")] == wanted


def test_a_best_validation_after_a_skipped_step_is_not_saved(project: Path, forker: Forker) -> None:
    """In step 3 the gradient is infinite: weights before it were not validated as those of step 3."""
    words = ("train.num_steps=5", "train.eval_every=3", "checkpoint.every=0")
    run = forker.train(project, "skipped", 1, *FALLS_AND_RISES, *words, fault="infinite_gradient")
    assert sorted(validated(run)) == [3, 5]
    assert [event["step"] for event in events(run, "checkpoint")] == [5]


@pytest.mark.parametrize("name", shipped())
def test_no_shipped_config_loses_its_run_to_a_crash(name: str) -> None:
    """A crash costs at most half of a run; no run saves its state tens of thousands of times."""
    config = load(name).config
    assert 2 <= config.train.num_steps / config.checkpoint.every <= 10_000


@pytest.mark.parametrize(
    "layout", ["pp", *(pytest.param(layout, marks=SLOW) for layout in ("dp", "dp_shard", "tp", "cp"))]
)
def test_a_run_ends_early_on_every_layout(project: Path, forker: Forker, whole: RunFolder, layout: str) -> None:
    words = ("train.stop_after=2", *LAYOUTS[layout])
    done = forker.run(project, 2, [f"run.name=early-{layout}", *FALLS_AND_RISES, *words])
    assert done.codes == [0, 0], done.said
    run = RunFolder.open(project / "runs" / f"early-{layout}")
    assert_same(run, whole, 1e-3, stop=24)
    assert [row["step"] for row in run.read_metrics()] == list(range(1, 25))
    assert kept(run) == [16, 24]
    (event,) = events(run, "early_stop")
    assert (event["step"], event["without_gain"], event["lowest_step"]) == (24, 2, 16)
    assert done.said.count("ended early at step 24 (train.stop_after = 2): 2 validations without a loss below") == 1


@pytest.mark.parametrize(
    "fault", ["killed 23", *(pytest.param(f"asked_to_stop {step}", marks=SLOW) for step in (22, 24))]
)
def test_a_resumed_run_counts_on(project: Path, forker: Forker, whole: RunFolder, fault: str) -> None:
    """Stopped between the validations that are counted, and at the step with which it would have ended."""
    name = f"early-{fault.replace(' ', '-')}"
    words = [*FALLS_AND_RISES, "train.stop_after=2"]
    assert forker.run(project, 1, [f"run.name={name}", *words], fault=fault).codes != [0]
    run = forker.train(project, name, 1, *words, resume=True)
    assert losses(run) == losses(whole)[:24]
    assert kept(run)[-1] == 24
    assert [event["step"] for event in events(run, "early_stop")] == [24]


def test_a_run_that_ended_early_says_how_to_go_on(project: Path, forker: Forker, whole: RunFolder) -> None:
    words = ["run.name=ended", *FALLS_AND_RISES, "train.stop_after=2"]
    forker.train(project, "ended", 1, *words)
    done = forker.run(project, 1, words, resume=True)
    assert done.codes == [0]
    assert "ended early at step 24" in done.said
    assert "to go on: codescent train --resume runs/ended train.stop_after=0 (or more than 2)" in done.said
    assert "has all its" not in done.said
    run = forker.train(project, "ended", 1, *words, "train.stop_after=3", resume=True)
    assert losses(run) == losses(whole)[:28]
    run = forker.train(project, "ended", 1, *words, "train.stop_after=0", resume=True)
    assert losses(run) == losses(whole)
    assert kept(run) == [16, 30]


def test_all_steps_win_over_an_early_end(project: Path, forker: Forker) -> None:
    words = ["run.name=both", *FALLS_AND_RISES, "train.stop_after=2", "train.num_steps=24"]
    run = forker.train(project, "both", 1, *words)
    assert [event["kind"] for event in run.read_events()][-1] == "end"
    assert not events(run, "early_stop")
    assert "has all its 24 steps. For 24 more: " in forker.run(project, 1, words, resume=True).said


def test_after_a_skipped_step_the_next_good_one_is_the_last(project: Path, forker: Forker) -> None:
    words = (*FALLS_AND_RISES, *STILL, "train.stop_after=2")
    run = forker.train(project, "put-off", 1, *words, fault="infinite_gradient")
    assert [event["step"] for event in events(run, "skipped_step")] == [3]
    assert [row["step"] for row in run.read_metrics()] == [1, 2, 3, 4]
    assert kept(run) == [4]  # of equal losses the newest is the best


def test_an_early_end_that_was_put_off_has_a_row(project: Path, forker: Forker) -> None:
    """The validation of step 3 ends the run, but step 3 is skipped; step 4 has no validation of its own."""
    words = (*FALLS_AND_RISES, *STILL, "train.stop_after=2")
    forker.train(project, "row", 1, *words, "train.num_steps=2")
    rare = ("train.eval_every=3", "log.metrics_every=100")
    run = forker.train(project, "row", 1, *words, *rare, resume=True, fault="infinite_gradient")
    assert [row["step"] for row in run.read_metrics()] == [1, 2, 3, 4]
    assert [event["step"] for event in events(run, "early_stop")] == [4]


def test_an_early_end_suggests_the_best_checkpoint(project: Path, whole: RunFolder) -> None:
    words = (*FALLS_AND_RISES, "train.stop_after=2", "log.sample_tokens=5", "run.name=best")
    ended = called(project, "train", "run.toml", *words)
    run = RunFolder.open(project / "runs" / "best")
    before = {path: path.read_bytes() for path in run.path.glob("*.*")}
    again = called(project, "train", "--resume", "runs/best")
    assert {path: path.read_bytes() for path in run.path.glob("*.*")} == before
    best = called(project, "sample", "runs/best", "--best", "--tokens", "5", "--seed", "1337").stdout
    for done in (ended, again):
        assert done.returncode == 0, done.stderr
        assert "more text: codescent sample runs/best --best" in done.stdout
    assert best.strip() in ended.stdout
    assert "text generated" not in again.stdout
    not_kept = called(project, "train", "run.toml", *words[:-1], "run.name=not", "checkpoint.keep_best=false")
    assert "more text: codescent sample runs/not\n" in not_kept.stdout


def test_a_run_that_would_end_early_without_a_number_has_failed(project: Path, forker: Forker) -> None:
    words = ["run.name=nan", *FALLS_AND_RISES, *STILL, "train.stop_after=1"]
    done = forker.run(project, 1, words, fault="validation_without_a_number")
    assert done.codes == [1]
    assert "ended at step 1, which is not saved: the validation loss is nan" in done.said
    assert kept(RunFolder.open(project / "runs" / "nan")) == []


def test_a_run_that_is_only_measured_saves_nothing_at_its_end(project: Path, forker: Forker) -> None:
    words = ("checkpoint.last=false", "train.num_steps=3", "train.eval_every=0")
    assert list(forker.train(project, "measured", 1, *words, "checkpoint.every=0").checkpoints.iterdir()) == []
    run = forker.train(project, "now-and-then", 1, *words, "checkpoint.every=2")
    assert [path.name for path in run.checkpoints.iterdir()] == ["step_00000002"]
    assert len(run.read_metrics()) == 3
    again = forker.train(project, "now-and-then", 1, *words, "checkpoint.every=2", resume=True)
    assert [event["step"] for event in again.read_events() if event["kind"] == "resume"] == [2]
    assert [row["step"] for row in again.read_metrics()] == [1, 2, 3]
