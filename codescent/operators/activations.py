"""In: activations. Out: those of the two halves of a gated feed-forward, and what comes out behind the gate.
Does not divide anything: a strategy that does puts what it sends into `before` and `after` of the layers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from codescent.operators.adapter import NONE, Adapter, add_, backward_, flat, product
from codescent.operators.linear import Later, Linear, apart, is_kept

# Shapes: N tokens, D hidden_dim, F ffn_dim; 2 is the gate g and what it lets through, u.
# swiglu(g, u) = silu(g) u,  silu(g) = g sigmoid(g)  (Shazeer 2020, "GLU Variants Improve Transformer", equation 6)
_PIECE = 1 << 17  # elements at a time on a CPU: the intermediate values stay in the caches of two cores


class GateUp(Linear):
    """x times the two matrices in one weight [F, 2, D], whose rows of a channel are side by side: [2, B, T, F].

    Some of the channels are some of the first dim, wherever it is cut.
    """

    def __init__(self, inputs: int, outputs: int, device: str) -> None:
        super().__init__(inputs, outputs, False, device)
        self.weight = nn.Parameter(torch.empty(outputs, 2, inputs, device=device))

    def _product(self, x_BTI: Tensor, bias_O: Tensor | None) -> Tensor:
        if torch.compiler.is_compiling():
            a_RI, b_F2R, scale = self.adapter
            halves = [NONE] * 2 if b_F2R is None else [Adapter(a_RI, b_FR, scale) for b_FR in b_F2R.unbind(1)]
            pairs = zip(self.weight.unbind(1), halves, strict=True)
            return torch.stack([product(x_BTI, matrix, None, half) for matrix, half in pairs])
        h_2BTF: Tensor = GateUpProduct.apply(x_BTI, self.weight, self.later, *self.adapter)  # type: ignore[no-untyped-call]
        return h_2BTF


class SwiGLUThenLinear(Linear):
    """(silu(g) u) W^T of h = [g, u]. Nobody else may read h: its memory is used again.

    Attributes:
        recompute: make silu(g) u again in the backward pass.
    """

    def __init__(self, inputs: int, outputs: int, device: str) -> None:
        super().__init__(inputs, outputs, False, device)
        self.recompute = False

    def _product(self, x_BTI: Tensor, bias_O: Tensor | None) -> Tensor:
        return swiglu_linear_(x_BTI, self.weight, self.recompute, self.later, self.adapter)


class GateUpProduct(torch.autograd.Function):
    """Two products, each with every second row of the weight, and their gradients in its layout without a copy."""

    @staticmethod
    def forward(
        ctx: Any,
        x_BTD: Tensor,
        weight_F2D: Tensor,
        later: Later | None,
        a_RD: Tensor | None,
        b_F2R: Tensor | None,
        scale: float,
    ) -> Tensor:
        """See `GateUp`."""
        ctx.later, ctx.parameter, ctx.scale = later, weight_F2D, scale
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
        """The gradients of x, of the weight and of the adapter."""
        x_BTD, weight_F2D, u_NR, a_RD, b_F2R = ctx.saved_tensors
        d_h_2NF, x_ND = d_h_2BTF.flatten(1, -2), flat(x_BTD)
        d_x_ND = torch.mm(d_h_2NF[0], weight_F2D[:, 0]).addmm_(d_h_2NF[1], weight_F2D[:, 1])
        d_a_RD, d_b_F2R = None, None
        if u_NR is not None:
            d_b_F2R = _by_rows(d_h_2NF, u_NR).mul_(ctx.scale)
            d_u_NR = torch.mm(d_h_2NF[0], b_F2R[:, 0]).addmm_(d_h_2NF[1], b_F2R[:, 1]).mul_(ctx.scale)
            d_a_RD = d_u_NR.t() @ x_ND
            d_x_ND.addmm_(d_u_NR, a_RD)
        d_weight_F2D = None
        if ctx.later is not None:
            ctx.later.append((ctx.parameter, lambda: _by_rows(d_h_2NF, x_ND)))
        elif ctx.needs_input_grad[1]:
            d_weight_F2D = _by_rows(d_h_2NF, x_ND)
        return d_x_ND.view(*d_h_2BTF.shape[1:-1], -1), d_weight_F2D, None, d_a_RD, d_b_F2R, None


@torch.no_grad()  # it may be called outside of the backward pass
def _by_rows(d_h_2NF: Tensor, x_ND: Tensor) -> Tensor:
    """d_h[0]^T x and d_h[1]^T x, a channel's rows side by side: [F, 2, D]."""
    out_F2D = x_ND.new_empty(d_h_2NF.shape[2], 2, x_ND.shape[1])
    for d_h_NF, out_FD in zip(d_h_2NF, out_F2D.unbind(1)):
        torch.mm(d_h_NF.t(), x_ND, out=out_FD)
    return out_F2D


def swiglu_linear_(
    h_2BTF: Tensor,
    weight_DF: Tensor,
    recompute: bool = False,
    later: Later | None = None,
    adapter: Adapter = NONE,
) -> Tensor:
    """(silu(h[0]) h[1]) weight^T: [B, T, D]. Nobody else may read h: its memory is used again.

    On a CPU the value is made together with its two slopes, while g and u are in the caches, and the slopes take the
    place of h: backward is two products. Three widths are kept, where torch's own operators would keep four. Where
    `is_kept` says no, only h is kept and they are made again.

    Args:
        h_2BTF: contiguous.
        weight_DF: the matrix.
        recompute: keep h alone for the backward pass.
        later: see `Linear`.
        adapter: beside the weight.
    """
    if torch.compiler.is_compiling() or (h_2BTF.device.type != "cpu" and not recompute and later is None):
        return product(F.silu(h_2BTF[0]) * h_2BTF[1], weight_DF, None, adapter)
    y_BTD: Tensor = SwiGLULinear.apply(h_2BTF, weight_DF, recompute, later, *adapter)  # type: ignore[no-untyped-call]
    return y_BTD


class SwiGLULinear(torch.autograd.Function):
    """See `swiglu_linear_`."""

    @staticmethod
    def forward(
        ctx: Any, h_2BTF: Tensor, weight_DF: Tensor, recompute: bool, later: Later | None, *adapter: Any
    ) -> Tensor:
        """See `swiglu_linear_`."""
        ctx.later, ctx.parameter, ctx.scale = later, weight_DF, adapter[-1]
        ctx.keeps = any(ctx.needs_input_grad) and not recompute and is_kept(h_2BTF[0])
        value_BTF = _value_and_slopes(h_2BTF, out_slopes=h_2BTF) if ctx.keeps else _value(h_2BTF)
        y_BTD = F.linear(value_BTF, weight_DF)
        u_NR = add_(y_BTD.flatten(0, -2), value_BTF.flatten(0, -2), Adapter(*adapter))
        read = ctx.keeps and (ctx.needs_input_grad[1] or u_NR is not None)
        # As an alias: autograd takes an input for unchanged, and h has become the slopes.
        kept_2BTF = h_2BTF.detach() if ctx.keeps else h_2BTF
        ctx.save_for_backward(value_BTF if read else None, kept_2BTF, weight_DF, u_NR, *adapter[:-1])
        return y_BTD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y_BTD: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of h, of the weight and of the adapter."""
        value_BTF, slopes_2BTF, weight_DF, u_NR, a_RF, b_DR = ctx.saved_tensors
        if not ctx.keeps:
            h_2BTF, slopes_2BTF = slopes_2BTF, torch.empty_like(slopes_2BTF)
            value_BTF = _value_and_slopes(h_2BTF, out_slopes=slopes_2BTF)
        d_y_ND, value_NF = flat(d_y_BTD), flat(value_BTF)
        d_weight_DF = None
        if ctx.later is not None:
            ctx.later.append((ctx.parameter, lambda: d_y_ND.t() @ apart(value_NF)))
        elif ctx.needs_input_grad[1]:
            d_weight_DF = d_y_ND.t() @ apart(value_NF)
        d_value_NF = d_y_ND @ apart(weight_DF)
        d_adapter = backward_(d_y_ND, value_NF, u_NR, Adapter(a_RF, b_DR, ctx.scale), d_value_NF)
        d_h_2BTF = slopes_2BTF * d_value_NF.view_as(slopes_2BTF[0])
        return d_h_2BTF, d_weight_DF, None, None, *d_adapter, None


def _value(h_2BTF: Tensor) -> Tensor:
    value_BTF = torch.empty_like(h_2BTF[0])
    for part_2X, value_1X in zip(_pieces(h_2BTF), _pieces(value_BTF[None]), strict=True):
        g, u = _wide(part_2X)
        value_1X[0] = (g * torch.sigmoid(g)).mul_(u)
    return value_BTF


def _value_and_slopes(h_2BTF: Tensor, out_slopes: Tensor) -> Tensor:
    """silu(g) u, and in `out_slopes` (which may be h) its slopes in g and in u.

    In u: silu(g). In g: u silu'(g) = u s + silu(g) u (1 - s), s = sigmoid(g): from the value to u by s.
    """
    value_BTF = torch.empty_like(h_2BTF[0])
    for part_2X, slopes_2X, value_1X in zip(
        _pieces(h_2BTF), _pieces(out_slopes), _pieces(value_BTF[None]), strict=True
    ):
        g, u = _wide(part_2X)
        s = torch.sigmoid(g)
        silu = g * s
        value = silu * u
        torch.lerp(value, u, s, out=s)
        value_1X[0] = value
        slopes_2X[0], slopes_2X[1] = s, silu
    return value_BTF


def _pieces(halves_2BTF: Tensor) -> tuple[Tensor, ...]:
    """Of both halves side by side; on a CPU so many that each stays in the caches."""
    numel = halves_2BTF[0].numel()
    size = _PIECE if halves_2BTF.device.type == "cpu" else max(1, numel)
    return torch.split(halves_2BTF.view(len(halves_2BTF), numel), size, dim=1)


def _wide(part_2X: Tensor) -> Tensor:
    """Views, where it is wide already."""
    return part_2X.to(torch.promote_types(part_2X.dtype, torch.float32))
