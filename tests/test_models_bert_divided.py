"""In: a BERT on padded samples, micro-batches without a target, several layouts. Out: the losses of one process.
Does not look inside the model (test_models_bert does) nor read a corpus: its samples are made up."""

from __future__ import annotations

from typing import Any

import bert_ranks
import pytest
from forker import Forker

Found = dict[str, dict[str, list[float]]]
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp_shard=2": (2, {"dp_shard": 2}),
    "pp=2": (2, {"pp": 2}),
    "tp=2": (2, {"tp": 2}),
}
SLOW: dict[str, tuple[int, dict[str, Any]]] = {
    "dp_replicate=2": (2, {"dp_replicate": 2}),
    "dp_shard=2 zero_stage=1": (2, {"dp_shard": 2, "zero_stage": 1}),
    "tp=2 sequence_parallel=false": (2, {"tp": 2, "sequence_parallel": False}),
    "pp=2 interleaved": (2, {"pp": 2, "schedule": "interleaved", "virtual_stages": 2, "recompute": "selective"}),
    "dp_shard=2 tp=2": (4, {"dp_shard": 2, "tp": 2, "recompute": "full"}),
    "pp=2 tp=2": (4, {"pp": 2, "tp": 2, "schedule": "zero-bubble"}),
}


@pytest.fixture(scope="module")
def alone(forker: Forker, tmp_path_factory: pytest.TempPathFactory) -> Found:
    (found,) = forker.call("bert_ranks:work", tmp_path_factory.mktemp("alone"), layout={})
    return found


@pytest.mark.parametrize("name", [*LAYOUTS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_every_layout_has_the_losses_of_one_process(
    alone: Found, forker: Forker, tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    ranks, layout = (LAYOUTS | SLOW)[name]
    for found in forker.call("bert_ranks:work", tmp_path_factory.mktemp("bert"), ranks, layout=layout):
        for head in bert_ranks.HEADS:
            for what, numbers in found[head].items():
                assert numbers == pytest.approx(alone[head][what], rel=1e-9), (head, what)


@pytest.mark.parametrize("head", bert_ranks.HEADS)
def test_there_is_something_to_compare(alone: Found, head: str) -> None:
    assert all(norm > 0.1 for norm in alone[head]["grad_norm"])
    assert len(set(alone[head]["loss"])) == bert_ranks.STEPS
