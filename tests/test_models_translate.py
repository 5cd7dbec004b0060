"""In: an encoder-decoder, targets of which some are not wanted. Out: losses of the others; what it tells by itself.
Does not divide it (test_pairs_runs does)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from codescent import models
from codescent.models.initialize import initialize_
from codescent.models.transformer.declare import TransformerShape, parameters
from codescent.models.transformer.module import Transformer
from codescent.models.transformer.translate import greedy
from codescent.operators.head import head_loss

SIZES = {"num_encoder_layers": 2, "num_decoder_layers": 2, "num_heads": 2, "hidden_dim": 12}
SIZES |= {"vocab_size": 11, "source_len": 5, "target_len": 6}


def built(**options: Any) -> Transformer:
    shape = models.shape_of("transformer", SIZES | options)
    assert isinstance(shape, TransformerShape)
    module = Transformer(shape, 4, "cpu").double()
    initialize_(module, 3, parameters(shape))
    return module


def batch(module: Transformer) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randint(0, 11, (3, 11), generator=generator)
    targets = torch.randint(0, 11, (3, 11), generator=generator)
    extras = {"source_lengths_B": torch.tensor([5, 2, 1]), "target_lengths_B": torch.tensor([3, 6, 1])}
    targets[:, :5] = -1
    for row, length in enumerate(extras["target_lengths_B"].tolist()):
        targets[row, 5 + length :] = -1
    return inputs, targets, extras


@pytest.mark.parametrize("vocab", [11, 3000])  # of both ways in which a CPU makes the softmax
@pytest.mark.parametrize("chunk", [0, 2, 1024])
def test_of_what_is_not_wanted_there_is_no_loss_and_no_gradient(chunk: int, vocab: int) -> None:
    generator = torch.Generator().manual_seed(1)
    mine, theirs = (
        [torch.randn(n, 6, generator=generator.manual_seed(n)).double().requires_grad_() for n in (9, vocab)]
        for _ in range(2)
    )
    targets = torch.randint(0, vocab, (9,), generator=generator)
    targets[[0, 4, 5]] = -1
    loss = head_loss(mine[0], mine[1], targets, chunk, skip_negative=True)
    loss.backward()
    expected = F.cross_entropy(theirs[0] @ theirs[1].t(), targets, ignore_index=-1, reduction="sum")
    expected.backward()
    torch.testing.assert_close(loss, expected)
    for a, b in zip(mine, theirs):
        torch.testing.assert_close(a.grad, b.grad)
    assert mine[0].grad is not None
    assert not mine[0].grad[[0, 4, 5]].any()


@pytest.mark.parametrize("options", [{}, {"embedding": "untied", "norm": "first"}, {"causal": False}])
def test_what_padding_holds_does_not_matter(options: dict[str, Any]) -> None:
    module = built(**options)
    inputs, targets, extras = batch(module)
    other = inputs.clone()
    for row, (source, target) in enumerate(
        zip(extras["source_lengths_B"].tolist(), extras["target_lengths_B"].tolist())
    ):
        other[row, source:5] = 7
        other[row, 5 + target :] = 8
    assert not torch.equal(inputs, other)
    found = []
    for tokens in (inputs, other):
        module.zero_grad()
        loss = module(tokens, targets, loss_scale=0.1, **extras)
        loss.backward()
        found.append(
            (loss.detach(), [parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None])
        )
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=1e-14)
    with torch.no_grad():
        logits = module(inputs, **extras)
    expected = F.cross_entropy(logits.flatten(0, 1), targets[:, 5:].flatten(), ignore_index=-1, reduction="sum")
    torch.testing.assert_close(found[0][0], expected)


@pytest.mark.parametrize("embedding", ["tied", "untied"])
def test_greedy_takes_the_likeliest_token_after_those_that_it_took(embedding: str) -> None:
    module = built(embedding=embedding).eval()
    for parameter in module.parameters():
        parameter.data *= 3  # so that it is not always the same token
    inputs, _, extras = batch(module)
    found = greedy(module, inputs[:, :5], extras["source_lengths_B"], begin=9, end=10)
    assert found.shape == (3, 6)
    filled, ended = torch.cat((inputs[:, :5], torch.full((3, 6), 10)), dim=1), torch.zeros(3).bool()
    filled[:, 5] = 9
    for position in range(6):
        with torch.no_grad():
            logits = module(filled, source_lengths_B=extras["source_lengths_B"])
        likeliest = logits[:, position].argmax(-1).masked_fill(ended, 10)
        assert torch.equal(found[:, position], likeliest)
        ended |= likeliest == 10
        if position < 5:
            filled[:, 6 + position] = likeliest
