"""In: activations. Out: both halves of a gated feed-forward; the product of a matrix with the gated value (SwiGLU).
Does not divide anything: a strategy that does puts its collectives into `before` and `after` of the layers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from codescent.operators.linear import (
    NO_ADAPTER,
    Activation,
    Adapter,
    Deferred,
    Linear,
    flat,
    is_kept,
    piece_size,
    product,
    weight_gradient,
)

# Shapes: N tokens, D hidden_dim, F ffn_dim, R the adapter's rank; 2 is the gate g and what it lets through, u.
# swiglu(g, u) = silu(g) u,  silu(g) = g sigmoid(g)  (Shazeer 2020, "GLU Variants Improve Transformer", equation 6)


class GateUp(Linear):
    """x times the two matrices in one weight [F, 2, D]: h [2, B, T, F].

    The two rows of a channel lie side by side, so a slice of dim 0 is a set of whole channels.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, False)
        self.weight = nn.Parameter(torch.empty(outputs, 2, inputs))

    def _product(self, x_BTI: Tensor, bias_O: Tensor | None) -> Tensor:
        adapter = self.adapter
        if torch.compiler.is_compiling():
            halves = [
                None if adapter is None else Adapter(adapter.a_RI, adapter.b_OR[:, half], adapter.scale)
                for half in range(2)
            ]
            pairs = zip(self.weight.unbind(1), halves, strict=True)
            return torch.stack([product(x_BTI, matrix, None, half) for matrix, half in pairs])
        inputs = (x_BTI, self.weight, self.deferred, *(adapter or NO_ADAPTER))
        h_2BTF: Tensor = _GateUpProduct.apply(*inputs)  # type: ignore[no-untyped-call]
        return h_2BTF


class _GateUpProduct(torch.autograd.Function):
    """Two products, each with every second row of the weight, and their gradients in its layout without a copy."""

    @staticmethod
    def forward(
        ctx: Any,
        x_BTD: Tensor,
        weight_F2D: Tensor,
        deferred: Deferred | None,
        a_RD: Tensor | None,
        b_F2R: Tensor | None,
        scale: float,
    ) -> Tensor:
        ctx.deferred, ctx.parameter, ctx.scale = deferred, weight_F2D, scale
        x_ND = x_BTD.flatten(0, -2)
        h_2NF = x_BTD.new_empty(2, len(x_ND), len(weight_F2D))
        for h_NF, weight_FD in zip(h_2NF, weight_F2D.unbind(1)):
            torch.mm(x_ND, weight_FD.t(), out=h_NF)
        u_NR = None
        if a_RD is not None and b_F2R is not None:
            u_NR = x_ND @ a_RD.t()
            for h_NF, b_FR in zip(h_2NF, b_F2R.unbind(1)):
                h_NF.addmm_(u_NR, b_FR.t(), alpha=scale)
        read = ctx.needs_input_grad[1] or u_NR is not None
        ctx.save_for_backward(x_BTD if read else None, weight_F2D, u_NR, a_RD, b_F2R)
        return h_2NF.view(2, *x_BTD.shape[:-1], len(weight_F2D))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_h_2BTF: Tensor) -> tuple[Tensor | None, ...]:
        x_BTD, weight_F2D, u_NR, a_RD, b_F2R = ctx.saved_tensors
        d_h_2NF, x_ND = d_h_2BTF.flatten(1, -2), flat(x_BTD)
        d_x_ND = torch.mm(d_h_2NF[0], weight_F2D[:, 0]).addmm_(d_h_2NF[1], weight_F2D[:, 1])
        d_a_RD, d_b_F2R = None, None
        if u_NR is not None:
            d_b_F2R = _by_rows(d_h_2NF, u_NR).mul_(ctx.scale)
            d_u_NR = torch.mm(d_h_2NF[0], b_F2R[:, 0]).addmm_(d_h_2NF[1], b_F2R[:, 1]).mul_(ctx.scale)
            d_a_RD = d_u_NR.t() @ x_ND
            d_x_ND.addmm_(d_u_NR, a_RD)
        d_weight_F2D = weight_gradient(ctx, lambda: _by_rows(d_h_2NF, x_ND), wanted=ctx.needs_input_grad[1])
        return d_x_ND.view(*d_h_2BTF.shape[1:-1], -1), d_weight_F2D, None, d_a_RD, d_b_F2R, None


@torch.no_grad()  # a deferred call is outside of the backward pass
def _by_rows(d_h_2NF: Tensor, x_ND: Tensor) -> Tensor:
    """d_h[0]^T x and d_h[1]^T x, a channel's rows side by side: [F, 2, D]."""
    out_F2D = x_ND.new_empty(d_h_2NF.shape[2], 2, x_ND.shape[1])
    for d_h_NF, out_FD in zip(d_h_2NF, out_F2D.unbind(1)):
        torch.mm(d_h_NF.t(), x_ND, out=out_FD)
    return out_F2D


def _value(h_2BTF: Tensor, out_slopes: Tensor | None) -> Tensor:
    """silu(g) u; its slopes in g and in u are written to `out_slopes`, which may be h. In at least fp32.

    The slope in u is silu(g). The slope in g is u silu'(g) = u s + silu(g) u (1 - s) with s = sigmoid(g): the
    interpolation from the value to u by s. Both are made while g and u are in the caches: three widths are kept, where
    torch's own operators would keep four.
    """
    value_BTF = torch.empty_like(h_2BTF[0])
    work = torch.promote_types(h_2BTF.dtype, torch.float32)
    slopes = _pieces(h_2BTF if out_slopes is None else out_slopes)
    for part_2X, slopes_2X, value_1X in zip(_pieces(h_2BTF), slopes, _pieces(value_BTF[None]), strict=True):
        g, u = part_2X.to(work)
        s = torch.sigmoid(g)
        silu = g * s
        if out_slopes is None:
            value_1X[0] = silu.mul_(u)
        else:
            value_1X[0] = value = silu * u
            slopes_2X[0], slopes_2X[1] = torch.lerp(value, u, s, out=s), silu
    return value_BTF


def _pieces(halves_2BTF: Tensor) -> tuple[Tensor, ...]:
    """Split both halves into pieces side by side."""
    flat_2X = halves_2BTF.view(len(halves_2BTF), halves_2BTF[0].numel())
    return torch.split(flat_2X, piece_size(flat_2X[0]), dim=1)


SWIGLU = Activation(
    plain=lambda h_2BTF: F.silu(h_2BTF[0]) * h_2BTF[1],
    value=_value,
    gradient=lambda slopes_2BTF, d_value_NF: slopes_2BTF * d_value_NF.view_as(slopes_2BTF[0]),
    keeps=lambda h_2BTF: is_kept(h_2BTF[0]),
)
"""silu(g) u of h = [g, u]."""
