"""In: scores and logits with a soft cap, windows, norms with 1 + w. Out: the values and gradients of plain formulas.
Does not compare with transformers (test_families does) or run layouts (test_traits does)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from codescent.operators.attention import attend_to_seen, causal_attention
from codescent.operators.block_attention import ScoreTraits
from codescent.operators.head import head_loss
from codescent.operators.plus_one_norm import PlusOneNorm
from codescent.plan.objective import Objective

BOUNDS = {torch.float64: 1e-11, torch.float32: 4e-6, torch.bfloat16: 3e-2}


def by_formula(qkv: Tensor, scores: ScoreTraits) -> Tensor:
    """The definition, of all pairs. [B, T, D]."""
    batch, length, _, rows, channels = qkv.shape
    q, k, v = qkv.double().split([rows - 2, 1, 1], dim=3)
    products = torch.einsum("btgrk,bsgrk->bgrts", q, k.expand_as(q)) * scores.factor(channels)
    if scores.cap:
        products = scores.cap * torch.tanh(products / scores.cap)
    apart = torch.arange(length)[:, None] - torch.arange(length)
    seen = (apart >= 0) & (apart < (scores.window or length))
    p = products.masked_fill(~seen, -torch.inf).softmax(-1)
    y: Tensor = torch.einsum("bgrts,bsgrk->btgrk", p, v.expand_as(q))
    return y.reshape(batch, length, -1)


def near(mine: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert mine.dtype == dtype
    assert float((mine.detach().double() - expected).norm() / expected.norm()) < BOUNDS[dtype]


SCORES = [ScoreTraits(cap=1.5), ScoreTraits(100, 1.5, 9), ScoreTraits(5, 20.0), ScoreTraits(width=40)]


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("scores", SCORES, ids=str)
def test_attention_is_that_of_the_formula(scores: ScoreTraits, dtype: torch.dtype) -> None:
    """Catches: a cap after the mask, a slope that is left out, a factor of the channels in place of the given one."""
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(2, 150, 2, 4, 16, generator=generator).to(dtype).requires_grad_()
    exact = qkv.detach().double().requires_grad_()
    expected = by_formula(exact, scores)
    upstream = torch.randn(expected.shape, generator=generator).to(dtype)
    (gradient,) = torch.autograd.grad(expected, exact, upstream.double())
    opaque = torch.ops.codescent.block_attention(qkv, scores.window, scores.cap, scores.width)[0]
    for mine in (causal_attention(qkv, scores=scores), opaque):
        near(mine, expected.detach(), dtype)
        near(torch.autograd.grad(mine, qkv, upstream)[0], gradient, dtype)
    q, k, v = qkv.detach().transpose(1, 2).split([2, 1, 1], dim=3)
    apart = torch.arange(150)[:, None] - torch.arange(150)
    seen = ((apart >= 0) & (apart < (scores.window or 150)))[None, None]
    cached = attend_to_seen(q.permute(0, 1, 3, 2, 4).flatten(1, 2), k.squeeze(3), v.squeeze(3), seen, scores)
    near(cached.transpose(1, 2).flatten(2), expected.detach(), dtype)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("chunk", [0, 7])
@pytest.mark.parametrize("objective", [Objective(), Objective(0.1, 1e-3)], ids=["plain", "smoothed"])
def test_the_loss_of_capped_logits(dtype: torch.dtype, chunk: int, objective: Objective) -> None:
    """Catches: a gradient without the slope of the cap, padding of the logits that is no longer 0."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20, 24, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(67, 24, generator=generator).to(dtype).requires_grad_()
    targets, cap = torch.randint(0, 67, (20,), generator=generator), 3.0
    exact = [one.detach().double().requires_grad_() for one in (x, weight)]
    logits = cap * torch.tanh(exact[0] @ exact[1].t() / cap)
    expected = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=objective.label_smoothing)
    expected = expected + objective.z_loss * logits.logsumexp(-1).square().sum()
    gradients = torch.autograd.grad(expected, exact)
    mine = head_loss(x, weight, targets, chunk, objective=objective, cap=cap)
    assert abs(mine.item() / expected.item() - 1.0) < BOUNDS[dtype]
    for found, other in zip(torch.autograd.grad(mine, [x, weight]), gradients, strict=True):
        near(found, other, dtype)


@pytest.mark.parametrize("dtype", BOUNDS)
def test_the_norm_that_adds_one(dtype: torch.dtype) -> None:
    """Catches: 1 + w that is rounded before the product, a gradient of the weight over the wrong dims."""
    generator = torch.Generator().manual_seed(0)
    norm = PlusOneNorm(40, 1e-5).to(dtype)
    torch.nn.init.normal_(norm.weight, std=1e-3, generator=generator)
    x = torch.randn(2, 9, 40, generator=generator).to(dtype).requires_grad_()
    exact = [one.detach().double().requires_grad_() for one in (x, norm.weight)]
    expected = F.rms_norm(exact[0], (40,), 1.0 + exact[1], 1e-5)
    upstream: Any = torch.randn(expected.shape, generator=generator).to(dtype)
    gradients = torch.autograd.grad(expected, exact, upstream.double())
    mine = norm(x)
    near(mine, expected.detach(), dtype)
    for found, other in zip(torch.autograd.grad(mine, [x, norm.weight], upstream), gradients, strict=True):
        near(found, other, dtype)
