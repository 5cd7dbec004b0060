"""In: runs whose loss, gradients, weights or validation loss are not finite. Out: no such weights saved, exit code 1,
the reason, and a way to go on. Does not test how a step is skipped: test_hybrids does, on every layout."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
from forker import Done, Forker
from runs import assert_same, called, codescent, losses

from codescent.checkpoint.checkpoints import read_tensors
from codescent.config.optimizer import Optimizer
from codescent.config.parallel import Parallel
from codescent.record import RunFolder
from codescent.train.display import Display
from codescent.train.report import Report

DIVERGES = (
    "optimizer.kind=sgd",
    "optimizer.momentum=0.9",
    "optimizer.learning_rate=200",
    "optimizer.warmup_steps=100",
    "optimizer.max_grad_norm=0",
    "optimizer.decay_steps=200",
    "train.num_steps=60",
    "train.eval_every=0",
    "checkpoint.keep_best=false",
    "checkpoint.keep_last=1",
)
"""Gradients are finite up to step 7, of 5 for certain, and infinite from step 8, or one beside it, on."""
OVERFLOWS = (*DIVERGES[:2], "optimizer.learning_rate=1e300", *DIVERGES[4:])
"""The first update, of finite gradients, makes infinite weights."""
REASON = "loss or gradients are not finite, skipped steps in a row"


def steps(project: Path, name: str) -> list[int]:
    """The steps whose checkpoints are there; each must be finite."""
    folders = sorted((project / "runs" / name / "checkpoints").iterdir())
    for folder in folders:
        assert all(bool(tensor.isfinite().all()) for tensor in read_tensors(folder).values()), folder
    return [int(folder.name.removeprefix("step_")) for folder in folders]


def kinds(run: RunFolder) -> list[str]:
    return [event["kind"] for event in run.read_events()]


def fail(forker: Forker, project: Path, name: str, *words: str, fault: str = "", ranks: int = 1) -> Done:
    """A run that must end with exit code 1 on every rank, saying why."""
    done = forker.run(project, ranks, [f"run.name={name}", *words], fault=fault)
    assert done.codes == [1] * ranks, done.said
    assert "Traceback" not in done.said
    assert kinds(RunFolder.open(project / "runs" / name))[-1] == "failed"
    return done


def test_the_last_good_checkpoint_stays_and_the_advice_works(project: Path, forker: Forker) -> None:
    """Each step is saved, one checkpoint is kept; the newest is finite, and all of the ten steps after it failed."""
    done = fail(forker, project, "advised", *DIVERGES, "checkpoint.every=1")
    run = RunFolder.open(project / "runs" / "advised")
    last = max(row["step"] for row in run.read_metrics()) - 10
    assert steps(project, "advised") == [last - 1, last]
    assert f"{REASON}: 10" in done.said
    assert f"continue from step {last - 1}: codescent train" in done.said
    advice = done.said[done.said.index("codescent train") :].splitlines()[0].partition(" (")[0]
    _, *words = shlex.split(advice)
    assert words == ["train", "--resume", "runs/advised", "optimizer.learning_rate=20"]
    before = losses(run)
    again = called(project, *words, "optimizer.learning_rate=1e-9", f"train.num_steps={last + 5}")
    assert again.returncode == 0, again.stderr
    assert f"step {last - 1}" in again.stdout
    assert "optimizer.learning_rate: 200.0 before, 1e-09 from this step on" in again.stdout
    assert steps(project, "advised") == [last + 5]
    (resumed,) = [event for event in run.read_events() if event["kind"] == "resume"]
    assert resumed["step"] == last - 1
    assert resumed["changes"]["optimizer.learning_rate"] == [200.0, 1e-9]
    assert resumed["removed"] == [f"runs/advised/checkpoints/step_{last:08}"]
    assert losses(run)[: last - 1] == before[: last - 1]
    assert [row["step"] for row in run.read_metrics()] == list(range(1, last + 6))
    assert "learning_rate = 1e-09" in RunFolder.open(run.path).config_text


def test_a_run_that_ends_within_the_skipped_steps_has_failed(project: Path, forker: Forker) -> None:
    done = fail(forker, project, "short", *DIVERGES, "train.num_steps=10", "checkpoint.every=5")
    assert re.search(f"ended at step 10, which is not saved: {REASON}: [2-5]\n", done.said)
    assert "continue from step 5: " in done.said
    assert steps(project, "short") == [5]
    run = RunFolder.open(project / "runs" / "short")
    assert [row["step"] for row in run.read_metrics()] == list(range(1, 11))


def test_infinite_weights_are_never_saved(project: Path, forker: Forker) -> None:
    """On both ranks, although only one has checked any one part. Without a good checkpoint it begins again."""
    words = (*OVERFLOWS, "parallel.dp_shard=2", "checkpoint.every=1")
    done = fail(forker, project, "overflowed", *words, ranks=2)
    assert "ended at step 1, which is not saved: weights or the optimizer's state are not finite" in done.said
    assert "continue from step 0: " in done.said
    assert steps(project, "overflowed") == []
    words = (*words, "optimizer.learning_rate=1e-3", "train.num_steps=4")
    run = forker.train(project, "overflowed", 2, *words, resume=True)
    assert [row["step"] for row in run.read_metrics()] == [1, 2, 3, 4]
    assert steps(project, "overflowed") == [4]


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (3, ("train.global_batch_size=9",)),
        (2, ("train.precision=bf16", "train.microbatch_size=2")),
        (2, ("parallel.dp_shard=2", "parallel.zero_stage=3")),
    ],
)
def test_a_gradient_that_is_not_finite_names_its_rank_and_first_tensor(
    project: Path, forker: Forker, ranks: int, words: tuple[str, ...]
) -> None:
    """Fault: after the sum over ranks all have the same gradients, and nobody knows whose machine is at fault."""
    name = f"whose-{ranks}-{len(words)}-{words[0]}"
    run = forker.train(
        project, name, ranks, *words, "train.num_steps=4", "train.eval_every=0", fault="infinite_gradient"
    )
    (event,) = [event for event in run.read_events() if event["kind"] == "skipped_step"]
    (found,) = event["gradients"]
    assert found["rank"] == ranks - 1
    assert found["tensor"].startswith("blocks.0.")
    assert found["tensor"].endswith(".weight")
    assert found["tensors"] >= 2


def test_a_gradient_is_named_also_where_its_step_is_read_late(project: Path, forker: Forker) -> None:
    """Fault: the next step, which is launched before the result is read, has overwritten what was noted."""
    words = ("train.num_steps=5", "train.eval_every=0")
    run = forker.train(project, "whose-late", 2, *words, fault="late infinite_gradient")
    (event,) = [event for event in run.read_events() if event["kind"] == "skipped_step"]
    assert [(one["rank"], one["tensor"][:8]) for one in event["gradients"]] == [(1, "blocks.0")]


def test_infinite_weights_of_one_rank_are_never_saved(project: Path, forker: Forker) -> None:
    """A rank sees only its own shards; every rank has to know what one of them has found."""
    words = ("parallel.dp_shard=2", "checkpoint.every=1", "train.num_steps=5", "train.eval_every=0")
    done = fail(forker, project, "one-rank", *words, ranks=2, fault="infinite_state")
    assert "ended at step 3, which is not saved: weights or the optimizer's state are not finite" in done.said
    assert steps(project, "one-rank")[-1] == 2


def test_a_validation_loss_that_is_not_a_number_is_told_and_not_saved(project: Path, forker: Forker) -> None:
    done = fail(
        forker,
        project,
        "invalid",
        *OVERFLOWS,
        "optimizer.learning_rate=1e30",
        "train.num_steps=1",
        "train.eval_every=1",
    )
    assert "step 1: the validation loss is nan" in done.said
    assert "ended at step 1, which is not saved: the validation loss is nan" in done.said
    assert steps(project, "invalid") == []


@pytest.mark.parametrize("fault", ["infinite_gradient", "validation_without_a_number"])
def test_a_checkpoint_that_was_due_is_made_up_for_by_the_next_good_step(
    project: Path, forker: Forker, fault: str
) -> None:
    words = ("train.num_steps=5", "train.eval_every=3", "checkpoint.every=3", "checkpoint.keep_last=9")
    run = forker.train(project, fault, 1, *words, fault=fault)
    assert steps(project, fault) == [4, 5]
    (told,) = [event for event in run.read_events() if event["kind"] == "not_saved"]
    assert told["step"] == 3


def test_a_step_whose_loss_alone_is_infinite_is_skipped(project: Path, forker: Forker) -> None:
    words = ("train.num_steps=6", "train.eval_every=0")
    expected = forker.train(project, "gradient", 1, *words, fault="infinite_gradient")
    found = forker.train(project, "loss", 2, *words, fault="infinite_loss")
    assert kinds(found).count("skipped_step") == 1
    assert found.read_metrics()[2]["train_loss"] == float("inf")
    assert_same(found, expected, 1e-3, first=3)


def test_asked_to_stop_while_steps_are_skipped_it_saves_nothing(project: Path, forker: Forker) -> None:
    done = fail(forker, project, "asked", *DIVERGES, "checkpoint.every=5", fault="asked_to_stop", ranks=2)
    assert re.search(f"ended at step 10, which is not saved: {REASON}: [2-5]\n", done.said)
    assert steps(project, "asked") == [5]


def test_the_launcher_shows_the_reason_once(project: Path) -> None:
    words = ("run.name=launched", *DIVERGES, "checkpoint.every=5", "--ranks", "2")
    done = codescent(project, "train", "run.toml", *words)
    assert done.returncode == 1
    reason, advice = [line for line in done.stderr.splitlines() if " has no effect: " not in line]
    assert re.fullmatch(rf"error: runs/launched: ended at step \d+, which is not saved: {REASON}: 10", reason)
    assert advice.startswith("error: change keys of [optimizer] and continue from step 5: ")


def test_only_the_update_may_change_and_only_after_it_has_failed(project: Path, forker: Forker) -> None:
    fail(forker, project, "refused", *DIVERGES, "train.num_steps=10", "checkpoint.every=5")
    lower = "optimizer.learning_rate=0.01"
    for word in ("model.num_layers=3", "optimizer.kind=adamw", "run.seed=5"):
        words = ["run.name=refused", *DIVERGES, "train.num_steps=10", "checkpoint.every=5", lower, word]
        done = forker.run(project, 1, words, resume=True)
        assert done.codes == [2], done.said
        assert f"{word.partition('=')[0]}: the run in" in done.said
        assert "learning_rate: the run in" not in done.said
    words = [*DIVERGES, "train.num_steps=10", "checkpoint.every=5", "optimizer.learning_rate=1e-9"]
    forker.train(project, "refused", 1, *words, resume=True)
    done = forker.run(project, 1, ["run.name=refused", *words, lower, "train.num_steps=12"], resume=True)
    assert done.codes == [2]
    assert "learning_rate: the run in runs/refused has 1e-09, this config 0.01" in done.said


def test_by_the_same_update_a_failed_run_goes_on_from_its_newest_checkpoint(project: Path, forker: Forker) -> None:
    """Whoever takes a machine for the cause tries again on another one."""
    fail(forker, project, "again", *DIVERGES, "checkpoint.every=1")
    before = steps(project, "again")
    done = forker.run(project, 1, ["run.name=again", *DIVERGES, "checkpoint.every=1"], resume=True)
    assert done.codes == [1]
    assert f"at step {before[-1]}" in done.said
    assert "skipped steps in a row: 10" in done.said
    assert steps(project, "again") == before


def test_the_advice_lowers_the_rates_of_muon_and_of_the_outer_optimizer_too() -> None:
    report, optimizer = Report.__new__(Report), Optimizer(kind="muon", learning_rate=0.003, muon_learning_rate=0.02)
    report.display = Display(shown=False, num_steps=9, first_step=0)
    report.bad_data = []
    report.run = SimpleNamespace(  # type: ignore[assignment]
        path=Path("runs/a"),
        checkpoints=SimpleNamespace(newest_step=lambda before: 3),
        config=SimpleNamespace(optimizer=optimizer, parallel=Parallel()),
        folder=None,
    )
    advice = report.failed(9, "why", 8).problems[1]
    assert "runs/a optimizer.learning_rate=0.0003 optimizer.muon_learning_rate=0.002 (or" in advice
    report.run.config.optimizer = Optimizer(kind="muon", learning_rate=0.003)  # Muon has the rate of the others
    assert "muon" not in report.failed(9, "why", 8).problems[1]
    assert len(report.failed(9, "why", 8).problems) == 2
    report.run.config.parallel = Parallel(average_every=5, outer_optimizer="nesterov", outer_learning_rate=0.6)
    assert report.failed(9, "why", 8).problems[2] == (
        "or begin a new run.name with parallel.outer_learning_rate=0.06: a resumed run keeps its outer optimizer"
    )
    (alone,) = report.failed(9, "why", 8, culprit="rank 1 (on a)").problems
    assert "only rank 1 (on a) gave what is not finite" in alone
    report.bad_data = ["rank 1: one.pt: sample 7 of target"]  # a worker of a server that reads such data is no culprit
    assert report.failed(9, "why", 8, culprit="rank 1 (on a)").problems[1] == (
        "the data holds NaN or infinity: rank 1: one.pt: sample 7 of target: mend the data, and begin a new run"
    )
