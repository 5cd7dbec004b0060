"""In: one model on large and rare layouts, and with faults. Out: the losses of one process, the same end on all ranks.
Does not repeat the table of trajectories: test_trajectories has every pair of task, layout and precision."""

from __future__ import annotations

import math
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from _pytest.mark import ParameterSet
from forker import Forker, Runs
from runs import assert_same, environment, losses, make_project, train

from codescent.record import RunFolder

SIZES = (
    "model.num_heads=4",
    "model.hidden_dim=20",  # no multiple of dp_shard = 3 or 8
    "model.ffn_dim=45",  # odd: no multiple of any tp
    "model.vocab_size=97",  # a prime
    "data.tokenizer=char",
    "train.global_batch_size=12",
    "train.eval_every=3",
    "train.check_every=1",  # no layout's copies may differ by a bit
    "optimizer.decay_steps=20",
    "optimizer.max_grad_norm=0.1",  # less than that of any step: clipped by the norm of all the parts
)


@dataclass(frozen=True)
class Layout:
    """Keys of [parallel] for so many ranks; the model's layers; samples of a micro-batch; how many steps are walked."""

    keys: str
    ranks: int
    layers: int = 2
    microbatch_size: int = 3
    steps: int = 6
    dropout: float = 0.1

    @property
    def words(self) -> tuple[str, ...]:
        keys = (f"parallel.{key}" for key in self.keys.split())
        return (*keys, f"train.microbatch_size={self.microbatch_size}", f"train.num_steps={self.steps}", *self.model)

    @property
    def model(self) -> tuple[str, ...]:
        return (f"model.num_layers={self.layers}", f"model.dropout={self.dropout}")


SLOW = [
    Layout("tp=2 sequence_parallel=false", 2, steps=20),
    Layout("tp=2 recompute=full", 2, steps=20, dropout=0),
    Layout("tp=4", 4, steps=20),
    Layout("tp=4 sequence_parallel=false recompute=full", 4, microbatch_size=12, steps=20),
    Layout("pp=4", 4, layers=5, steps=20),
    Layout("pp=4 schedule=naive", 4, layers=5),
    Layout("pp=3 schedule=gpipe", 3, layers=5, microbatch_size=2, steps=20),
    Layout("pp=4 schedule=zero-bubble", 4, layers=5, microbatch_size=2, steps=20),
    Layout("pp=2 schedule=zero-bubble recompute=selective", 2, layers=5, steps=20),
    Layout("pp=4 schedule=interleaved virtual_stages=2", 4, layers=9, steps=20),
    Layout("pp=2 schedule=interleaved virtual_stages=4 recompute=full", 2, layers=9, steps=20),
    Layout("cp=2 context=all-gather recompute=full", 2, steps=20),
    Layout("cp=4", 4, steps=20),
    Layout("cp=2 recompute=full", 2, steps=20, dropout=0),
    Layout("tp=2 recompute=products", 2, steps=20, dropout=0),
    Layout("cp=2 recompute=products", 2, steps=20, dropout=0),
    Layout("dp_shard=2 recompute=products", 2, microbatch_size=2, steps=20),
    Layout("dp_shard=3 zero_stage=1", 3, microbatch_size=2, steps=20),
    Layout("dp_shard=3 zero_stage=2 recompute=full", 3, microbatch_size=2, steps=20),
    Layout("dp_replicate=2 tp=2 sequence_parallel=false", 4, steps=20),
    Layout("dp_replicate=2 pp=2", 4, layers=5, steps=20),
    Layout("dp_replicate=2 cp=2", 4, steps=20),
    Layout("dp_replicate=2 cp=2 context=all-gather", 4, microbatch_size=6, steps=20),
    Layout("dp_shard=2 tp=2 zero_stage=1", 4, steps=20),
    Layout("dp_shard=2 tp=2 zero_stage=2 sequence_parallel=false recompute=full", 4, steps=20),
    Layout("dp_shard=2 cp=2 zero_stage=1", 4, steps=20),
    Layout("dp_shard=2 cp=2 zero_stage=2 context=all-gather recompute=full", 4, steps=20),
    Layout("pp=2 tp=2 schedule=interleaved virtual_stages=2", 4, layers=5, steps=20),
    Layout("pp=2 tp=2 schedule=zero-bubble sequence_parallel=false", 4, layers=5, steps=20),
    Layout("pp=2 cp=2 schedule=interleaved virtual_stages=2", 4, layers=5, steps=20),
    Layout("pp=2 cp=2 schedule=zero-bubble context=all-gather", 4, layers=5, steps=20),
    Layout("pp=2 dp_shard=2 zero_stage=1 schedule=gpipe", 4, layers=5, steps=20),
    Layout("pp=2 dp_shard=2 zero_stage=2", 4, layers=5, steps=20),
    Layout("pp=2 dp_shard=2 schedule=interleaved virtual_stages=2 recompute=full", 4, layers=5, steps=20),
    Layout("pp=4 dp_replicate=2", 8, layers=5),
    Layout("dp_replicate=2 pp=2 tp=2 schedule=interleaved virtual_stages=2", 8, layers=5),
    Layout("dp_replicate=2 dp_shard=2 tp=2", 8),
    Layout("dp_shard=2 pp=2 tp=2", 8, layers=5),
    Layout("dp_shard=2 cp=2 tp=2 zero_stage=2", 8),
    Layout("dp_replicate=2 dp_shard=2 cp=2", 8),
    Layout("pp=2 cp=2 dp_shard=2 recompute=selective", 8, layers=5),
    Layout("dp_replicate=2 pp=2 dp_shard=2 cp=2 tp=2", 32, microbatch_size=3, steps=3),
]
SLOW_IN_NARROWER_FORMATS = [
    Layout("tp=2 sequence_parallel=false", 2, steps=20),
    Layout("pp=2", 2, layers=5, steps=20),
    Layout("cp=2 context=all-gather", 2, steps=20),
    Layout("dp_shard=3", 3, microbatch_size=2, steps=20),
    Layout("dp_shard=2 tp=2", 4, steps=20),
    Layout("pp=2 dp_shard=2 zero_stage=2", 4, layers=5, steps=20),
    Layout("pp=2 tp=2", 4, layers=5, steps=20),
    Layout("dp_replicate=2 pp=2 tp=2", 8, layers=5, steps=20),
]
TOLERANCE = {"fp64": 1e-9, "fp32": 1e-4}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, forker: Forker) -> Runs:
    project = tmp_path_factory.mktemp("hybrids")
    make_project(project)
    return Runs(project, forker, SIZES, ("train.num_steps=20", "train.microbatch_size=12"))


def walk(runs: Runs, layout: Layout, precision: str, *words: str) -> None:
    words = (f"train.precision={precision}", *words)
    expected = runs.of_one(*layout.model, *words)
    found = runs.run(layout.ranks, *layout.words, *words)
    assert len(losses(found)) == layout.steps
    assert_same(found, expected, TOLERANCE[precision], stop=layout.steps)
    assert losses(expected)[-1] < losses(expected)[0] - 1  # it learns: equality of runs that stand still proves nothing
    assert all(row["grad_norm"] > 0.1 for row in found.read_metrics())


def named(layouts: Sequence[Layout], slow: Sequence[Layout] = ()) -> list[ParameterSet]:
    """Parameters of a test, by their keys."""
    return [pytest.param(layout, id=layout.keys) for layout in layouts] + [
        pytest.param(layout, id=layout.keys, marks=pytest.mark.slow) for layout in slow
    ]


@pytest.mark.slow
@pytest.mark.parametrize("layout", named(SLOW))
def test_every_layout_walks_the_trajectory_of_one(runs: Runs, layout: Layout) -> None:
    walk(runs, layout, "fp64")


@pytest.mark.slow
@pytest.mark.parametrize("layout", named(SLOW_IN_NARROWER_FORMATS))
def test_layouts_in_fp32(runs: Runs, layout: Layout) -> None:
    walk(runs, layout, "fp32")


@pytest.mark.slow
@pytest.mark.parametrize("layout", named(SLOW_IN_NARROWER_FORMATS))
def test_layouts_in_bf16_follow_fp32_closely(runs: Runs, layout: Layout) -> None:
    expected = runs.of_one(*layout.model, "train.precision=fp32")
    found = runs.run(layout.ranks, *layout.words, "train.precision=bf16")
    assert losses(found) != losses(expected)[: layout.steps]
    # One process in bf16 has losses within 0.0005 and norms within 0.013 of its own in fp32.
    assert_same(found, expected, 0.02, stop=layout.steps)


FAULTY = [Layout("", 1), Layout("tp=2", 2), Layout("pp=2", 2), Layout("dp_shard=2", 2)]
FAULTY_SLOW = [
    Layout("tp=2 sequence_parallel=false", 2),
    Layout("cp=2", 2),
    Layout("dp_shard=2 zero_stage=1", 2),
    Layout("pp=2 tp=2 schedule=interleaved virtual_stages=2", 4, layers=4),
    Layout("dp_replicate=2 pp=2 tp=2", 8),
]


@pytest.mark.parametrize("layout", named(FAULTY, FAULTY_SLOW))
def test_an_infinite_gradient_on_one_rank_skips_the_step_on_all(runs: Runs, layout: Layout) -> None:
    words = ("train.precision=fp64", "train.microbatch_size=6", "train.num_steps=6")
    sound = runs.of_one(*layout.model, "train.precision=fp64")
    expected = runs.run(1, *layout.model, *words, fault="infinite_gradient")
    found = runs.run(layout.ranks, *layout.words, *words, fault="infinite_gradient")
    (skipped,) = [event for event in found.read_events() if event["kind"] == "skipped_step"]
    assert skipped["step"] == 3
    (named,) = skipped["gradients"]
    assert (named["rank"], named["host"]) == (layout.ranks - 1, socket.gethostname())
    assert named["tensor"].startswith("blocks.")
    assert named["tensor"].endswith(".weight")
    assert_same(found, sound, 1e-9, stop=2)
    assert not math.isfinite(found.read_metrics()[2]["grad_norm"])
    assert losses(found)[2] == pytest.approx(losses(sound)[2], rel=1e-9)  # the loss itself is sound
    assert_same(found, expected, 1e-9, first=3)
    assert losses(found)[3:6] != pytest.approx(losses(sound)[3:6], rel=1e-6)


@pytest.mark.parametrize("layout", named(FAULTY[1:], FAULTY_SLOW))
def test_a_learning_rate_that_overflows_ends_the_run_on_all_ranks(runs: Runs, layout: Layout) -> None:
    words = ("train.precision=fp64", "optimizer.learning_rate=1e200", "train.num_steps=20", "train.eval_every=0")
    done = runs.start(layout.ranks, *layout.words, "train.microbatch_size=6", *words)
    assert done.codes == [1] * layout.ranks, done.said
    assert "loss or gradients are not finite, skipped steps in a row: 10" in done.said
    assert "Traceback" not in done.said


@pytest.mark.slow
def test_through_the_command_line(runs: Runs) -> None:
    layout = Layout("tp=2", 2)
    words = (*SIZES, *layout.words, "train.precision=fp64", "--ranks", str(layout.ranks))
    found = train(runs.project, "by-hand", *words)
    assert_same(found, runs.of_one(*layout.model, "train.precision=fp64"), 1e-9, stop=layout.steps)


@pytest.mark.slow
def test_under_torchrun(runs: Runs) -> None:
    layout = Layout("pp=2 schedule=interleaved virtual_stages=2", 2, layers=5)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(layout.ranks)]
    words = ["-m", "codescent", "train", "run.toml", "run.name=torchrun", "train.precision=fp64", *SIZES, *layout.words]
    done = subprocess.run(
        [*command, *words],
        cwd=runs.project,
        env=environment(),
        text=True,
        capture_output=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = RunFolder.open(runs.project / "runs" / "torchrun")
    assert_same(found, runs.of_one(*layout.model, "train.precision=fp64"), 1e-9, stop=layout.steps)
