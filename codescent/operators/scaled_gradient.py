"""In: a tensor, a factor. Out: the same tensor; backward multiplies its gradient by the factor.
Does not scale the gradients of heads: operators/head.py does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def scaled_gradient(x: Tensor, factor: float) -> Tensor:
    """x, whose gradient is multiplied by `factor`: for losses whose gradients autograd computes."""
    scaled: Tensor = _ScaledGradient.apply(x, factor)  # type: ignore[no-untyped-call]
    return scaled


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_x: Tensor) -> tuple[Tensor, None]:
        return d_x * ctx.factor, None
