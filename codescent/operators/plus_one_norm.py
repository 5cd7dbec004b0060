"""In: activations, a weight w. Out: each row divided by its root mean square, times 1 + w (Gemma's RMSNorm).
Does not compute norms of heads (head_norm.py does), or a norm that multiplies by w (torch.nn.RMSNorm does)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from codescent.operators.compiled import compiled_off_cpu, plain_inference

# Shapes: B samples, T positions, D channels.


class PlusOneNorm(nn.Module):
    """x / sqrt(mean of x^2 + eps) * (1 + weight) (Zhang and Sennrich 2019; the released code of Gemma).

    Computed in at least fp32 and rounded once: in bf16, 1 + w alone would lose most digits of a small w.
    """

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x_BTD: Tensor) -> Tensor:
        """[B, T, D], in the dtype of x."""
        if plain_inference():
            return _normed(x_BTD, self.weight, self.eps)[0]
        y_BTD: Tensor = _PlusOneNorm.apply(x_BTD, self.weight, self.eps)  # type: ignore[no-untyped-call]
        return y_BTD


class _PlusOneNorm(torch.autograd.Function):
    """See `PlusOneNorm`. Forward saves its input, and a number of each row."""

    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        y_BTD, rates_BT1 = _normed(x_BTD, weight_D, eps)
        ctx.save_for_backward(x_BTD, weight_D, rates_BT1)
        return y_BTD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y_BTD: Tensor) -> tuple[Tensor, Tensor, None]:
        return *_gradients(d_y_BTD, *ctx.saved_tensors), None


@compiled_off_cpu
def _normed(x_BTD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The result, and 1 / root mean square of each row."""
    wide = torch.promote_types(x_BTD.dtype, torch.float32)
    wide_BTD = x_BTD.to(wide)
    rates_BT1 = (wide_BTD.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (wide_BTD * rates_BT1 * (1.0 + weight_D.to(wide))).to(x_BTD.dtype), rates_BT1


@compiled_off_cpu
def _gradients(d_y_BTD: Tensor, x_BTD: Tensor, weight_D: Tensor, rates_BT1: Tensor) -> tuple[Tensor, Tensor]:
    """Of x and of the weight."""
    wide = rates_BT1.dtype
    unit_BTD, d_wide_BTD = x_BTD.to(wide) * rates_BT1, d_y_BTD.to(wide)
    d_unit_BTD = d_wide_BTD * (1.0 + weight_D.to(wide))
    d_x_BTD = (d_unit_BTD - unit_BTD * (d_unit_BTD * unit_BTD).mean(-1, keepdim=True)) * rates_BT1
    return d_x_BTD.to(x_BTD.dtype), (d_wide_BTD * unit_BTD).flatten(0, -2).sum(0).to(weight_D.dtype)
