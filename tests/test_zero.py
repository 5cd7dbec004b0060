"""In: one config under ZeRO and its hybrids with replication. Out: the losses of one process; checkpoints that move.
Does not count bytes or collectives: test_declared does."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import pytest
from forker import Forker
from runs import assert_same, called, losses

from codescent.record import RunFolder

LAYOUTS = {
    "one": (1, ()),
    "ddp2": (2, ()),
    "ddp4": (4, ()),
    "zero1x2": (2, ("parallel.dp_shard=2", "parallel.zero_stage=1")),
    "zero2x2": (2, ("parallel.dp_shard=2", "parallel.zero_stage=2")),
    "zero3x2": (2, ("parallel.dp_shard=2",)),
    "zero3x4": (4, ("parallel.dp_shard=4",)),
    "hsdp1": (4, ("parallel.dp_shard=2", "parallel.zero_stage=1")),
    "hsdp3": (4, ("parallel.dp_shard=2",)),
}


class Run(Protocol):
    """A run of that name on real ranks, in a layout by its name or in a number of them, which must end well."""

    def __call__(self, name: str, layout: str | int, *words: str, resume: bool = False) -> RunFolder: ...


@pytest.fixture(scope="module")
def run(project: Path, forker: Forker) -> Run:
    def run(name: str, layout: str | int, *words: str, resume: bool = False) -> RunFolder:
        ranks, keys = LAYOUTS[layout] if isinstance(layout, str) else (layout, ())
        return forker.train(project, name, ranks, *keys, *words, resume=resume)

    return run


@pytest.fixture(scope="module")
def alone(run: Run) -> dict[str, RunFolder]:
    return {precision: run(f"one-{precision}", "one", f"train.precision={precision}") for precision in ("fp64", "fp32")}


@pytest.mark.parametrize(
    ("layout", "microbatch_size"),
    [
        pytest.param("zero1x2", 2, marks=pytest.mark.slow),
        pytest.param("zero2x2", 2, marks=pytest.mark.slow),
        pytest.param("zero3x2", 4, marks=pytest.mark.slow),
        pytest.param("hsdp3", 1, marks=pytest.mark.slow),
        pytest.param("zero1x2", 4, marks=pytest.mark.slow),
        pytest.param("zero2x2", 4, marks=pytest.mark.slow),
        pytest.param("zero3x2", 2, marks=pytest.mark.slow),
        pytest.param("zero3x4", 1, marks=pytest.mark.slow),
        pytest.param("hsdp1", 1, marks=pytest.mark.slow),
        pytest.param("hsdp1", 2, marks=pytest.mark.slow),
    ],
)
def test_zero_walks_the_trajectory_of_one(
    run: Run, alone: dict[str, RunFolder], layout: str, microbatch_size: int
) -> None:
    words = ("train.precision=fp64", f"train.microbatch_size={microbatch_size}")
    assert_same(run(f"{layout}-{microbatch_size}", layout, *words), alone["fp64"], 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["zero3x2", "zero3x4"])
def test_zero_in_fp32(run: Run, alone: dict[str, RunFolder], layout: str) -> None:
    assert_same(run(f"{layout}-fp32", layout, "train.precision=fp32"), alone["fp32"], 1e-4)


@pytest.mark.parametrize("layout", ["zero1x2", "zero3x2"])
def test_reductions_of_fully_shard_are_ours(
    project: Path, forker: Forker, alone: dict[str, RunFolder], layout: str
) -> None:
    ranks, words = LAYOUTS[layout]
    words = (*words, "train.precision=fp64", "train.microbatch_size=2")
    found = forker.train(project, f"{layout}-theirs", ranks, *words, fault="reductions_of_fully_shard")
    assert_same(found, alone["fp64"], 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["zero1x2", "zero3x2"])
def test_zero_in_bf16_follows_fp32_closely(run: Run, alone: dict[str, RunFolder], layout: str) -> None:
    found = run(f"{layout}-bf16", layout, "train.precision=bf16", "train.microbatch_size=2")
    assert losses(found) == pytest.approx(losses(alone["fp32"]), rel=0.03)
    assert losses(found) != losses(alone["fp32"])


def test_sizes_that_do_not_divide(run: Run) -> None:
    """Sixteen rows over three ranks: 6, 6 and 4; three samples to validate with, one for each rank."""
    words = ("train.precision=fp64", "train.global_batch_size=6", "train.eval_samples=3", "model.dropout=0.1")
    expected = run("uneven-one", 1, *words)
    found = run("uneven-three", 3, *words, "parallel.dp_shard=3")
    assert_same(found, expected, 1e-9)


def test_a_rank_without_validation_samples_takes_part(run: Run) -> None:
    words = ("train.precision=fp64", "train.eval_samples=1")
    expected = run("one-sample-one", 1, *words)
    assert_same(run("one-sample-two", "zero3x2", *words), expected, 1e-9)


@pytest.mark.parametrize("kind", [pytest.param("sgd", marks=pytest.mark.slow), "adagrad"])
def test_other_update_rules_on_shards(run: Run, kind: str) -> None:
    words = ("train.precision=fp64", f"optimizer.kind={kind}", "train.num_steps=10")
    expected = run(f"{kind}-one", 1, *words)
    assert_same(run(f"{kind}-two", "zero2x2", *words), expected, 1e-9)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("ddp4", "zero3x2"),
        ("zero1x2", "one"),
        pytest.param("zero3x2", "ddp2", marks=pytest.mark.slow),
        pytest.param("zero1x2", "zero3x4", marks=pytest.mark.slow),
        pytest.param("hsdp3", "one", marks=pytest.mark.slow),
        pytest.param("one", "hsdp1", marks=pytest.mark.slow),
        pytest.param("zero3x4", "zero2x2", marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_of_any_layout_continues_on_any_other(
    run: Run, alone: dict[str, RunFolder], before: str, after: str
) -> None:
    name = f"{before}-to-{after}"
    words = ("train.precision=fp64", "optimizer.decay_steps=20")
    run(name, before, *words, "train.num_steps=10")
    assert_same(run(name, after, *words, resume=True), alone["fp64"], 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["blocks", "model"])
def test_compiled_shards(run: Run, alone: dict[str, RunFolder], what: str) -> None:
    found = run(f"compiled-{what}", "zero3x2", "train.precision=fp64", f"train.compile={what}")
    assert_same(found, alone["fp64"], 1e-9)


@pytest.mark.slow
def test_a_rank_whose_shards_are_empty(run: Run) -> None:
    """Sixteen rows over five ranks: 4, 4, 4, 4 and none."""
    words = ("train.precision=fp64", "train.global_batch_size=5")
    expected = run("empty-one", 1, *words)
    assert_same(run("empty-five", 5, *words, "parallel.dp_shard=5"), expected, 1e-9)


def test_a_plan_says_what_a_rank_holds(project: Path) -> None:
    words = ("plan", "run.toml", "parallel.dp_shard=4", "--ranks", "4")
    done = called(project, *words)
    assert done.returncode == 0, done.stderr
    assert "dp_shard 4" in done.stdout
    assert "reduce_scatter" in done.stdout


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["parallel.dp_shard=4"],
            "dp_shard 4 x cp 1 x tp 1 = 4 ranks for one copy of the model, which do not divide the",
        ),
        (["parallel.dp_shard=2", "parallel.zero_stage=4"], "must be a whole number >= 1 and <= 3"),
        (
            ["parallel.dp_shard=2", "parallel.zero_stage=1", "train.microbatch_size=1", "parallel.reduce_dtype=bf16"],
            "adds micro-batches in the format in which it sends",
        ),
    ],
)
def test_what_zero_refuses(project: Path, words: list[str], expected: str) -> None:
    done = called(project, "train", "run.toml", "run.name=refused", *words, "--ranks", "2")
    assert done.returncode == 2
    assert expected in done.stderr
    assert "Traceback" not in done.stderr
    assert not (project / "runs" / "refused").exists()
