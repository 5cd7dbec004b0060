"""In: models whose activations are made again in the backward pass. Out: the same gradients, from less memory.
Does not measure memory of a process: it counts the bytes that autograd keeps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from forker import Forker
from runs import losses

from codescent import models
from codescent.build import build
from codescent.config.sections import Config
from codescent.models.initialize import initialize_
from codescent.strategies import Recompute, ThisRank

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


def kept_and_gradients(what: str, precision: str, dropout: float = 0.0) -> tuple[int, list[torch.Tensor]]:
    """Bytes that autograd keeps of two samples, and the gradients that it makes of them."""
    values = {
        "model": {"num_layers": 3, "num_heads": 2, "hidden_dim": 32, "seq_len": 24, "dropout": dropout},
        "train": {"precision": precision, "global_batch_size": 2},
        "parallel": {"recompute": what},
    }
    plan = build(Config.model_validate(values), 50, 1)
    sizes = {name: values["model"].get(name) for name in models.SIZES} | {"vocab_size": 50}
    shape = models.shape_of("gpt2", sizes, dropout=dropout)  # type: ignore[arg-type]
    module = models.construct(models.facts_of("gpt2", shape))
    if Recompute().active(plan):
        Recompute().divide(module, ThisRank(plan, 0, {}))
    module.to_empty(device="cpu")
    initialize_(module, 1, models.parameters_of("gpt2", shape))
    module.to(DTYPES[precision])
    if dropout:
        module.set_dropout_context(1, 0, torch.arange(2))  # type: ignore[operator]
    tokens = torch.arange(50).reshape(2, 25) % 50
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = module(tokens[:, :-1], tokens[:, 1:])
    parameters = {p.untyped_storage().data_ptr() for p in module.parameters()}
    loss.backward()
    return sum(size for place, size in kept.items() if place not in parameters), [p.grad for p in module.parameters()]  # type: ignore[misc]


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_the_same_gradients_from_less(precision: str, dropout: float) -> None:
    kept, gradients = zip(*(kept_and_gradients(what, precision, dropout) for what in ("none", "selective", "full")))
    assert kept[0] > kept[1] > kept[2]
    itemsize = DTYPES[precision].itemsize
    activations = 2 * 24 * 3  # samples, positions, layers
    # GELU gives up its value and its slope for what it was made from; without dropout, attention its probabilities.
    assert kept[0] - kept[1] == activations * itemsize * (128 + (2 * 24 if not dropout else 0))
    for others in gradients[1:]:
        for found, expected in zip(others, gradients[0], strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("words", [(), ("parallel.dp_shard=2",)])
def test_training_is_the_same(project: Path, forker: Forker, words: tuple[str, ...]) -> None:
    ranks = 1 + len(words)
    name = f"shards-{ranks}"
    common = ("train.precision=fp64", "train.microbatch_size=2", "model.dropout=0.1", "train.num_steps=8", *words)
    expected = losses(forker.train(project, f"{name}-none", ranks, *common))
    assert losses(forker.train(project, f"{name}-full", ranks, *common, "parallel.recompute=full")) == expected
