"""In: activations x, the gate and up matrices of a gated feed-forward. Out: both products, as one node of autograd.
Does not apply the activation between the gate and the values (activations.py and gated.py do)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from codescent.operators import products
from codescent.operators.compiled import FEW, plain_inference
from codescent.operators.kept import keeping
from codescent.operators.linear import (
    NO_ADAPTER,
    Deferred,
    Drops,
    Linear,
    add_product,
    dropped,
    product,
    unpacked,
    weight_gradient,
)
from codescent.operators.nf4 import Packed

# Shapes: B batch, T positions, N = B * T tokens, D hidden_dim, F ffn_dim, R the adapter's rank; 2: the gate, and the
# values that it multiplies.


class GateUp(Linear):
    """x times the gate matrix and the up matrix, which are one weight [F, 2, D]: h [2, B, T, F].

    The two rows of a channel are adjacent, so a slice of dim 0 contains whole channels.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, False)
        self.weight = nn.Parameter(torch.empty(outputs, 2, inputs))

    def _product(self, x_BTI: Tensor, bias_O: Tensor | None) -> Tensor:
        if self.reordered is not None and plain_inference():
            halves_2BTF = _by_half(self.reordered.linear(x_BTI))
            return halves_2BTF if halves_2BTF.numel() <= FEW else halves_2BTF.contiguous()
        if self.fp8 is not None:
            return torch.stack([self.fp8.linear(x_BTI, half, None) for half in self.weight.unbind(1)])
        adapter = self.adapter
        if torch.compiler.is_compiling():  # never with a packed weight
            halves = [None if adapter is None else adapter._replace(b_OR=adapter.b_OR[:, half]) for half in range(2)]
            pairs = zip(self.weight.unbind(1), halves, strict=True)
            return torch.stack([product(x_BTI, matrix, None, half) for matrix, half in pairs])
        if plain_inference() and adapter is None and not self.packed and x_BTI.numel() <= FEW:
            # One product for both: the rows of a channel are adjacent, so its results are.
            return _by_half(products.linear(x_BTI, self.weight.flatten(0, 1)))
        inputs = (x_BTI, self.weight, self.deferred, self.packed, *(adapter or NO_ADAPTER))
        h_2BTF: Tensor = _GateUpProduct.apply(*inputs)  # type: ignore[no-untyped-call]
        return h_2BTF


def _by_half(h_BTO: Tensor) -> Tensor:
    """[2, B, T, F] of the results of both rows of each channel, which are adjacent."""
    return torch.movedim(h_BTO.view(*h_BTO.shape[:-1], -1, 2), -1, 0)


class _GateUpProduct(torch.autograd.Function):
    """The two products of `GateUp`. Their weight gradients are written into one [F, 2, D] tensor without a copy."""

    @staticmethod
    def forward(
        ctx: Any,
        x_BTD: Tensor,
        weight_F2D: Tensor,
        deferred: Deferred | None,
        packed: Packed | None,
        a_RD: Tensor | None,
        b_F2R: Tensor | None,
        scale: float,
        drops: Drops | None,
    ) -> Tensor:
        ctx.deferred, ctx.parameter, ctx.scale, ctx.drops, ctx.packed = deferred, weight_F2D, scale, drops, packed
        x_ND, kept_F2D, weight_F2D = x_BTD.flatten(0, -2), weight_F2D, unpacked(weight_F2D, packed)
        if keeping():
            h_2NF = torch.stack([products.matmul(x_ND, weight_FD.t()) for weight_FD in weight_F2D.unbind(1)])
        else:
            h_2NF = x_BTD.new_empty(2, len(x_ND), len(weight_F2D))
            for h_NF, weight_FD in zip(h_2NF, weight_F2D.unbind(1)):
                products.mm(x_ND, weight_FD.t(), out=h_NF)
        u_NR = None
        if a_RD is not None and b_F2R is not None:
            u_NR = products.mm(dropped(x_BTD, drops), a_RD.t())
            for h_NF, b_FR in zip(h_2NF, b_F2R.unbind(1)):
                products.addmm_(h_NF, u_NR, b_FR.t(), scale)
        needs_x = ctx.needs_input_grad[1] or u_NR is not None
        ctx.save_for_backward(x_BTD if needs_x else None, kept_F2D, u_NR, a_RD, b_F2R)
        return h_2NF.view(2, *x_BTD.shape[:-1], len(weight_F2D))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_h_2BTF: Tensor) -> tuple[Tensor | None, ...]:
        x_BTD, weight_F2D, u_NR, a_RD, b_F2R = ctx.saved_tensors
        d_h_2NF = d_h_2BTF.flatten(1, -2)
        x_ND: Any = None if x_BTD is None else x_BTD.flatten(0, -2)  # forward did not save what no gradient reads
        d_x_ND = _by_halves(d_h_2NF, unpacked(weight_F2D, ctx.packed))
        d_a_RD, d_b_F2R = None, None
        if u_NR is not None:
            d_b_F2R = _by_rows(d_h_2NF, u_NR).mul_(ctx.scale)
            d_u_NR = _by_halves(d_h_2NF, b_F2R).mul_(ctx.scale)
            d_a_RD = products.mm(d_u_NR.t(), dropped(x_BTD, ctx.drops))
            add_product(d_x_ND, d_u_NR, a_RD, x_BTD, ctx.drops)
        d_weight_F2D = weight_gradient(ctx, partial(_by_rows, d_h_2NF, x_ND), wanted=ctx.needs_input_grad[1])
        return d_x_ND.view(*d_h_2BTF.shape[1:-1], -1), d_weight_F2D, None, None, d_a_RD, d_b_F2R, None, None


def _by_halves(d_h_2NF: Tensor, matrix_F2X: Tensor) -> Tensor:
    """d_h[0] times the first half of the matrix, plus d_h[1] times the second: [N, X]."""
    first_NX = products.mm(d_h_2NF[0], matrix_F2X[:, 0])
    return products.addmm_(first_NX, d_h_2NF[1], matrix_F2X[:, 1])


@torch.no_grad()  # a deferred call runs outside the backward pass
def _by_rows(d_h_2NF: Tensor, x_ND: Tensor) -> Tensor:
    """d_h[0]^T x and d_h[1]^T x, with the two rows of a channel adjacent: [F, 2, D]."""
    out_F2D = x_ND.new_empty(d_h_2NF.shape[2], 2, x_ND.shape[1])
    for d_h_NF, out_FD in zip(d_h_2NF, out_F2D.unbind(1)):
        products.mm(d_h_NF.t(), x_ND, out=out_FD)
    return out_F2D
