"""In: activations h, a weight matrix W. Out: f(h) W^T for f = GELU or f of gated.py, as one node of autograd.
Does not split W over ranks: strategies do, and set functions that the layer calls before and after the product."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from codescent.operators import products
from codescent.operators.compiled import FEW, plain_inference
from codescent.operators.kept import keeping
from codescent.operators.linear import (
    NO_ADAPTER,
    Adapter,
    Deferred,
    Linear,
    add_product,
    dropped,
    is_kept,
    product,
    weight_gradient,
)
from codescent.operators.nf4 import Packed

# Shapes: B batch, T positions, N = B * T tokens, O outputs, D hidden_dim, F ffn_dim, R the adapter's rank; 2: the gate
# g, and the values u that it multiplies.
# tanh-GELU: gelu(x) = x (1 + tanh(u)) / 2 = x sigmoid(2u),  2u = x (A + B x^2)  (Hendrycks and Gimpel 2016)
GELU_A = 2.0 * math.sqrt(2.0 / math.pi)
GELU_B = GELU_A * 0.044715
_PIECE = 1 << 17  # elements computed at a time on a CPU: the intermediate values fit in the caches of two cores
_PAGE_BYTES = 4096  # addresses at this distance fall into the same set of a first-level cache
_LINE_BYTES = 64


@dataclass(frozen=True)
class Activation:
    """An activation function before a matrix, with a hand-written gradient.

    Attributes:
        plain: h -> the value, by torch's own operators.
        value: h, memory for the slope (the derivative at h) or None -> the value. The memory may be h itself.
        gradient: slope, gradient of the value -> gradient of h. It may overwrite both inputs.
        keeps: h -> whether forward saves value and slope; if not, backward recomputes them from h.
        reads_h: torch has a kernel that computes the gradient from h. Then no slope is computed, and
            `activated_linear_` uses our backward pass on CUDA, too.
        elsewhere: what our pass uses off the CPU, where whole tensors in fp32 would be slow; None: the same.
    """

    plain: Callable[[Tensor], Tensor]
    value: Callable[[Tensor, Tensor | None], Tensor]
    gradient: Callable[[Tensor, Tensor], Tensor]
    keeps: Callable[[Tensor], bool]
    reads_h: bool = False
    elsewhere: Activation | None = None


class ActivatedThenLinear(Linear):
    """activation(h) W^T + b; see `activated_linear_`. The strategy `recompute` sets the attribute `recompute`."""

    def __init__(self, inputs: int, outputs: int, bias: bool, activation: Activation) -> None:
        super().__init__(inputs, outputs, bias)
        self.activation = activation
        self.recompute = False

    def _product(self, x_BTI: Tensor, bias_O: Tensor | None) -> Tensor:
        if self.reordered is not None and plain_inference():
            is_few = x_BTI.numel() <= FEW
            value = self.activation.plain(x_BTI) if is_few else self.activation.value(x_BTI, None)
            return self.reordered.linear(value, bias_O)
        if self.fp8 is not None:
            return self.fp8.linear(self.activation.plain(x_BTI), self.weight, bias_O)
        return activated_linear_(
            self.activation, x_BTI, self.weight, bias_O, self.recompute, self.deferred, self.adapter, self.packed
        )


def activated_linear_(
    activation: Activation,
    h: Tensor,
    weight_OF: Tensor,
    bias_O: Tensor | None = None,
    recompute: bool = False,
    deferred: Deferred | None = None,
    adapter: Adapter | None = None,
    packed: Packed | None = None,
) -> Tensor:
    """activation(h) weight^T + bias: [B, T, O]. It may overwrite h, so the caller must not read h afterwards.

    h is contiguous, [B, T, F], or [2, B, T, F] for a gated activation. With `recompute` forward saves only h. The other
    arguments are as in `Linear`.
    """
    if not torch.is_grad_enabled() and h.numel() <= FEW and plain_inference():
        return product(activation.plain(h), weight_OF, bias_O, adapter, packed)
    recompute = recompute or (keeping() and h.device.type == "cpu")
    by_torch = not (h.device.type == "cpu" or recompute or deferred is not None or activation.reads_h)
    if torch.compiler.is_compiling() or by_torch:
        return product(activation.plain(h), weight_OF, bias_O, adapter, packed)
    if h.device.type != "cpu":
        activation = activation.elsewhere or activation
    inputs = (activation, h, weight_OF, bias_O, recompute, deferred, packed, *(adapter or NO_ADAPTER))
    y_BTO: Tensor = _ActivatedLinear.apply(*inputs)  # type: ignore[no-untyped-call]
    return y_BTO


class _ActivatedLinear(torch.autograd.Function):
    """See `activated_linear_`. The value and the slope are the largest activations of a layer. Forward saves both, or
    it saves only h and backward recomputes both."""

    @staticmethod
    def forward(
        ctx: Any,
        activation: Activation,
        h: Tensor,
        weight_OF: Tensor,
        bias_O: Tensor | None,
        recompute: bool,
        deferred: Deferred | None,
        packed: Packed | None,
        *adapter: Any,
    ) -> Tensor:
        a_RF, b_OR, ctx.scale, ctx.drops = adapter
        ctx.activation, ctx.deferred, ctx.parameter, ctx.packed = activation, deferred, weight_OF, packed
        ctx.keeps = any(ctx.needs_input_grad) and not recompute and activation.keeps(h)
        value_BTF = activation.value(h, h if ctx.keeps else None)
        y_BTO = products.linear(value_BTF, weight_OF if packed is None else packed(weight_OF), bias_O)
        u_NR = None
        if a_RF is not None:
            u_NR = products.linear(dropped(value_BTF, ctx.drops), a_RF)
            products.addmm_(y_BTO.flatten(0, -2), u_NR, b_OR.t(), ctx.scale)
        needs_value = ctx.keeps and (ctx.needs_input_grad[2] or u_NR is not None)
        # Saved as an alias: autograd assumes that an input is unchanged, but h now holds the slope.
        h_or_slope = h.detach() if ctx.keeps else h
        ctx.save_for_backward(value_BTF if needs_value else None, h_or_slope, weight_OF, u_NR, a_RF, b_OR)
        return y_BTO

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y_BTO: Tensor) -> tuple[Tensor | None, ...]:
        value_BTF, slope, weight_OF, u_NR, a_RF, b_OR = ctx.saved_tensors
        activation: Activation = ctx.activation
        if not ctx.keeps:
            h, slope = slope, slope if activation.reads_h else torch.empty_like(slope)
            value_BTF = activation.value(h, slope)
        d_y_NO = d_y_BTO.flatten(0, -2)
        value_NF = _flat(value_BTF)
        make = partial(_weight_product, d_y_NO, value_NF)
        d_weight_OF = weight_gradient(ctx, make, wanted=ctx.needs_input_grad[2])
        wide_OF = weight_OF if ctx.packed is None else ctx.packed(weight_OF)
        d_value_NF = products.mm(d_y_NO, with_padded_rows(wide_OF))
        d_a_RF, d_b_OR = None, None
        if u_NR is not None:
            d_u_NR = products.mm(d_y_NO, b_OR).mul_(ctx.scale)
            add_product(d_value_NF, d_u_NR, a_RF, value_BTF, ctx.drops)
            d_a_RF = products.mm(d_u_NR.t(), dropped(value_BTF, ctx.drops))
            d_b_OR = products.mm(d_y_NO.t(), u_NR).mul_(ctx.scale)
        d_h = activation.gradient(slope, d_value_NF)
        d_bias_O = d_y_NO.sum(0) if ctx.needs_input_grad[3] else None
        return None, d_h, d_weight_OF, d_bias_O, None, None, None, d_a_RF, d_b_OR, None, None


def _weight_product(d_y_NO: Tensor, value_NF: Tensor) -> Tensor:
    return products.mm(d_y_NO.t(), with_padded_rows(value_NF))


def feed_forward(width: int, inner: int, bias: bool, activation: Activation) -> nn.Sequential:
    """A linear layer, then an activation and a second linear layer."""
    up, down = Linear(width, inner, bias), ActivatedThenLinear(inner, width, bias, activation)
    return nn.Sequential(OrderedDict(up=up, down=down))


def _flat(x_BTI: Any) -> Any:
    """[N, I]; None for a tensor that forward did not save, because no gradient reads it. Typed as autograd types it."""
    return None if x_BTI is None else x_BTI.flatten(0, -2)


def with_padded_rows(matrix: Tensor) -> Tensor:
    """The matrix, or a copy with padded rows if products with the matrix would be slow.

    oneDNN's fp32 kernels read a few columns of many rows. Rows three or five pages apart (the feed-forward of
    hidden_dim 768 and 1280) share their cache sets, and the kernels run at less than half of their speed. The copy has
    its rows one cache line further apart. If the distance is a power of two, oneDNN copies by itself. MKL (the "exact"
    kernels) always copies.
    """
    rows, columns = matrix.shape
    distance_bytes = columns * matrix.itemsize
    harmless = distance_bytes % _PAGE_BYTES != 0 or distance_bytes.bit_count() == 1
    if harmless or matrix.dtype != torch.float32 or torch.get_float32_matmul_precision() == "highest":
        return matrix
    return matrix.new_empty(rows, columns + _LINE_BYTES // matrix.itemsize)[:, :columns].copy_(matrix)


def piece_size(x: Tensor) -> int:
    """Number of elements of x to compute at a time: on a CPU as many as fit in the caches, elsewhere all."""
    return _PIECE if x.device.type == "cpu" else max(1, x.numel())


def _gelu(x: Tensor, out_slope: Tensor | None) -> Tensor:
    """gelu(x), and gelu'(x) = gate + gelu(x) (1 - gate) (A + 3 B x^2), gate = sigmoid(x (A + B x^2)), in `out_slope`.

    On a CPU torch evaluates tanh-GELU in 1.8 to 2.1 ns per element (one AVX-512 core), sigmoid in 0.2 to 0.4. So this
    function uses sigmoid, and computes the slope together with the value: 1.3 ns for both instead of 2.7.
    """
    y = torch.empty_like(x)
    work = torch.promote_types(x.dtype, torch.float32)
    narrow = x.dtype != work
    factor = torch.tensor(GELU_A, dtype=work)  # torch vectorises `add` with a scalar tensor, but not `addcmul`
    size = piece_size(x)
    scratch = x.new_empty(4 if narrow else 2, min(size, x.numel()), dtype=work)
    for start in range(0, x.numel(), size):
        piece = slice(start, start + size)
        x_piece, y_piece = x.view(-1)[piece], y.view(-1)[piece]
        gate, slope, *wider = scratch[:, : len(x_piece)].unbind()
        wide, value = wider if narrow else (x_piece, y_piece)
        if narrow:
            wide.copy_(x_piece)
        torch.mul(wide, wide, out=slope)
        torch.add(factor, slope, alpha=GELU_B, out=gate).mul_(wide).sigmoid_()
        torch.mul(wide, gate, out=value)
        if narrow:
            y_piece.copy_(value)
        if out_slope is not None:  # it may be x itself, which is not read again
            torch.add(factor, slope, alpha=3.0 * GELU_B, out=slope).mul_(value)
            slope.addcmul_(slope, gate, value=-1.0)
            torch.add(slope, gate, out=slope if narrow else out_slope.view(-1)[piece])
            if narrow:
                out_slope.view(-1)[piece].copy_(slope)
    return y


def _gelu_of_torch(approximate: str) -> Activation:
    """GELU by torch's kernels, which compute the gradient from h."""
    plain = partial(F.gelu, approximate=approximate)
    return Activation(
        plain=plain,
        value=lambda h, _: plain(h),
        gradient=lambda h, d_value_NF: torch.ops.aten.gelu_backward(d_value_NF.view_as(h), h, approximate=approximate),
        keeps=lambda h: h.device.type != "cpu" or is_kept(h),
        reads_h=True,
    )


GELU = Activation(
    plain=partial(F.gelu, approximate="tanh"),
    value=_gelu,
    gradient=lambda slope, d_value_NF: d_value_NF.view_as(slope).mul_(slope),
    keeps=is_kept,
    elsewhere=_gelu_of_torch("tanh"),
)
"""GELU in its tanh form."""

EXACT_GELU = _gelu_of_torch("none")
"""GELU by the error function."""
