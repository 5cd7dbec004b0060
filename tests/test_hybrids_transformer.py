"""In: an encoder-decoder under axes of the mesh and their products. Out: the losses of one process, all through.
Does not look inside the model (test_models_transformer does) and refuses nothing (test_build_transformer does)."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from forker import Forker, Runs
from runs import assert_same, losses, make_project

SIZES = (
    "model.kind=transformer",
    "model.num_layers=auto",
    "model.seq_len=auto",
    "model.num_encoder_layers=2",
    "model.num_decoder_layers=3",
    "model.num_heads=4",
    "model.hidden_dim=20",
    "model.ffn_dim=45",  # odd: no multiple of any tp
    "model.vocab_size=97",  # a prime
    "model.source_len=12",
    "model.target_len=8",
    "model.dropout=0.1",
    "data.tokenizer=char",
    "train.precision=fp64",
    "train.global_batch_size=12",
    "train.eval_every=3",
    "optimizer.decay_steps=20",
    "optimizer.max_grad_norm=0.1",  # less than that of any step: clipped by the norm of all the parts
)
BETWEEN = "cut=encoder-decoder"


@dataclass(frozen=True)
class Layout:
    """Keys of [parallel] for so many ranks; words of the model; samples of a micro-batch."""

    keys: str
    ranks: int
    model: tuple[str, ...] = ()
    microbatch_size: int = 3

    @property
    def words(self) -> tuple[str, ...]:
        keys = (f"parallel.{key}" for key in self.keys.split())
        return (*keys, f"train.microbatch_size={self.microbatch_size}", *self.model)


FIRST = ("model.norm=first", "model.activation=gelu", "model.embedding=untied")
QUICK = [
    Layout(f"pp=2 {BETWEEN}", 2),
    Layout("tp=2", 2),
    Layout(f"pp=2 tp=2 {BETWEEN}", 4, microbatch_size=6),
]
SLOW = [
    Layout("dp_shard=2", 2),
    Layout("dp_replicate=2", 2),
    Layout("pp=2", 2, FIRST),
    Layout("pp=4", 4),
    Layout(f"pp=4 {BETWEEN}", 4, FIRST),
    Layout(f"pp=2 {BETWEEN} schedule=zero-bubble recompute=full", 2),
    Layout(f"pp=2 {BETWEEN} schedule=interleaved virtual_stages=2", 2),
    Layout("tp=2 sequence_parallel=false recompute=selective", 2),
    Layout("tp=4 recompute=full", 4, FIRST, microbatch_size=6),
    Layout("tp=2 dp_shard=2", 4, FIRST),
    Layout(f"pp=2 dp_shard=2 zero_stage=2 {BETWEEN}", 4),
    Layout(f"dp_replicate=2 pp=2 tp=2 {BETWEEN}", 8),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, forker: Forker) -> Runs:
    project = tmp_path_factory.mktemp("hybrids_transformer")
    make_project(project)
    return Runs(project, forker, SIZES, ("train.num_steps=20", "train.microbatch_size=12"))


@pytest.mark.parametrize(
    "layout",
    [pytest.param(layout, id=" ".join((layout.keys, *layout.model))) for layout in QUICK]
    + [pytest.param(layout, id=" ".join((layout.keys, *layout.model)), marks=pytest.mark.slow) for layout in SLOW],
)
def test_every_layout_walks_the_trajectory_of_one(runs: Runs, layout: Layout) -> None:
    expected = runs.of_one(*layout.model)
    found = runs.run(layout.ranks, *layout.words, "train.num_steps=6")
    assert len(losses(found)) == 6
    assert_same(found, expected, 1e-9, stop=6)
    assert losses(expected)[-1] < losses(expected)[0] - 0.5  # it learns
    assert all(row["grad_norm"] > 0.1 for row in found.read_metrics())
