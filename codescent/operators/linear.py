"""In: activations. Out: their product with a matrix, after an activation in a feed-forward, with an adapter if any.
Does not divide anything: a strategy that does puts its collectives into `before` and `after`."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

# Shapes: B batch, T positions, N = B * T, I inputs, O outputs, R the adapter's rank; F width of an activation.
# tanh-GELU: gelu(x) = x (1 + tanh(u)) / 2 = x sigmoid(2u),  2u = x (A + B x^2)  (Hendrycks and Gimpel 2016)
_A = 2.0 * math.sqrt(2.0 / math.pi)
_B = _A * 0.044715
_PIECE = 1 << 17  # elements at a time on a CPU: the intermediate values stay in the caches of two cores

_SMALL_BYTES = 4 << 20
_PAGE_BYTES = 4096  # addresses so far apart fall into the same set of a first-level cache
_LINE_BYTES = 64

Deferred = list[tuple[Tensor, Callable[[], Tensor]]]
"""Weights whose gradients a backward pass has deferred, each with the function that makes the gradient.

The list holds the parameters themselves. In the backward pass of a checkpointed block, the unpacked weight is a copy:
a gradient of the copy would be lost as soon as the graph of the block is freed.
"""


class Adapter(NamedTuple):
    """scale B A beside a matrix W (Hu et al. 2021, "LoRA", equation 3). B is [O, 2, R] for a weight [O, 2, I]."""

    a_RI: Tensor
    b_OR: Tensor
    scale: float


NO_ADAPTER = (None, None, 0.0)


class Linear(nn.Module):
    """x W^T + b, plus the product of the adapter if the layer has one.

    Attributes:
        lora_a, lora_b: the two matrices of the adapter; None: there is none.
        scale: factor on the product of the adapter.
        before: function of x that runs first where the weight is divided; None: nothing runs.
        after: function of x W^T that runs before the bias is added; None: nothing runs.
        first_output: index of the first output of this rank, where the outputs are divided.
        deferred: list to which backward appends the product that makes the weight's gradient; None: backward makes it.
    """

    def __init__(self, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None
        self.lora_a: nn.Parameter | None
        self.lora_b: nn.Parameter | None
        self.register_parameter("lora_a", None)
        self.register_parameter("lora_b", None)
        self.scale = 0.0
        self.before: Callable[[Tensor], Tensor] | None = None
        self.after: Callable[[Tensor], Tensor] | None = None
        self.first_output = 0
        self.deferred: Deferred | None = None

    def forward(self, x_BTI: Tensor) -> Tensor:
        """[B, T, O]."""
        if self.before is not None:
            x_BTI = self.before(x_BTI)
        if self.after is None:
            return self._product(x_BTI, self.bias)
        y_BTO = self.after(self._product(x_BTI, None))
        return y_BTO if self.bias is None else y_BTO + self.bias

    @property
    def adapter(self) -> Adapter | None:
        """The adapter; None: there is none."""
        return None if self.lora_a is None or self.lora_b is None else Adapter(self.lora_a, self.lora_b, self.scale)

    def _product(self, x_BTI: Tensor, bias_O: Tensor | None) -> Tensor:
        if self.deferred is None:
            return product(x_BTI, self.weight, bias_O, self.adapter)
        y_BTO: Tensor = _DeferredLinear.apply(x_BTI, self.weight, bias_O, self.deferred)  # type: ignore[no-untyped-call]
        return y_BTO


def product(x_BTI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, adapter: Adapter | None) -> Tensor:
    """x W^T + b + scale (x A^T) B^T: [B, T, O], with gradients by autograd."""
    if adapter is None:
        return F.linear(x_BTI, weight_OI, bias_O)
    x_NI = x_BTI.flatten(0, -2)
    y_NO = F.linear(x_NI, weight_OI, bias_O)
    # In the memory of y, which nobody else reads: two passes over it fewer.
    y_NO = y_NO.addmm_(F.linear(x_NI, adapter.a_RI), adapter.b_OR.t(), alpha=adapter.scale)
    return y_NO.view(*x_BTI.shape[:-1], -1)


def weight_gradient(ctx: Any, make: Callable[[], Tensor], *, wanted: bool) -> Tensor | None:
    """The gradient of `ctx.parameter`; None where it is not wanted, or where `ctx.deferred` takes its function."""
    if ctx.deferred is not None:
        ctx.deferred.append((ctx.parameter, make))
        return None
    return make() if wanted else None


class _DeferredLinear(torch.autograd.Function):
    """x W^T + b; backward makes the gradient of x and defers that of W (Qi et al. 2023, "Zero Bubble", section 2)."""

    @staticmethod
    def forward(ctx: Any, x_BTI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, deferred: Deferred) -> Tensor:
        ctx.save_for_backward(x_BTI, weight_OI)
        ctx.deferred, ctx.parameter = deferred, weight_OI
        return F.linear(x_BTI, weight_OI, bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y_BTO: Tensor) -> tuple[Tensor, None, Tensor | None, None]:
        x_BTI, weight_OI = ctx.saved_tensors
        d_y_NO = d_y_BTO.flatten(0, -2)
        weight_gradient(ctx, lambda: d_y_NO.t() @ x_BTI.flatten(0, -2), wanted=True)
        return d_y_BTO @ weight_OI, None, d_y_NO.sum(0) if ctx.needs_input_grad[2] else None, None


@dataclass(frozen=True)
class Activation:
    """An activation in front of a matrix, with a gradient made by hand.

    Attributes:
        plain: h -> the value, by torch's own operators.
        value: h, memory for the slope -> the value. None: no slope is made; the memory may be h itself.
        gradient: slope, gradient of the value -> gradient of h; it may overwrite both.
        keeps: h -> whether forward keeps for backward what backward could make again from h.
        reads_h: torch has a kernel for the gradient, which reads h: no slope is made, and `activated_linear_` uses our
            backward pass on CUDA too.
    """

    plain: Callable[[Tensor], Tensor]
    value: Callable[[Tensor, Tensor | None], Tensor]
    gradient: Callable[[Tensor, Tensor], Tensor]
    keeps: Callable[[Tensor], bool]
    reads_h: bool = False


class ActivatedThenLinear(Linear):
    """activation(h) W^T + b; see `activated_linear_`. A strategy sets `recompute`."""

    def __init__(self, inputs: int, outputs: int, bias: bool, activation: Activation) -> None:
        super().__init__(inputs, outputs, bias)
        self.activation = activation
        self.recompute = False

    def _product(self, x_BTI: Tensor, bias_O: Tensor | None) -> Tensor:
        return activated_linear_(
            self.activation, x_BTI, self.weight, bias_O, self.recompute, self.deferred, self.adapter
        )


def activated_linear_(
    activation: Activation,
    h: Tensor,
    weight_OF: Tensor,
    bias_O: Tensor | None = None,
    recompute: bool = False,
    deferred: Deferred | None = None,
    adapter: Adapter | None = None,
) -> Tensor:
    """activation(h) weight^T + bias: [B, T, O]. It may overwrite h: nothing else may read it.

    h is contiguous, [B, T, F], or [2, B, T, F] for a gated activation. With `recompute` backward keeps only h. The
    others are as in `Linear`.
    """
    by_torch = not (h.device.type == "cpu" or recompute or deferred is not None or activation.reads_h)
    if torch.compiler.is_compiling() or by_torch:
        return product(activation.plain(h), weight_OF, bias_O, adapter)
    inputs = (activation, h, weight_OF, bias_O, recompute, deferred, *(adapter or NO_ADAPTER))
    y_BTO: Tensor = _ActivatedLinear.apply(*inputs)  # type: ignore[no-untyped-call]
    return y_BTO


class _ActivatedLinear(torch.autograd.Function):
    """See `activated_linear_`. The value and the slope are the largest activations of a layer: forward keeps both, or
    only h, and then backward makes them again."""

    @staticmethod
    def forward(
        ctx: Any,
        activation: Activation,
        h: Tensor,
        weight_OF: Tensor,
        bias_O: Tensor | None,
        recompute: bool,
        deferred: Deferred | None,
        *adapter: Any,
    ) -> Tensor:
        a_RF, b_OR, scale = adapter
        ctx.activation, ctx.deferred, ctx.parameter, ctx.scale = activation, deferred, weight_OF, scale
        ctx.keeps = any(ctx.needs_input_grad) and not recompute and activation.keeps(h)
        value_BTF = activation.value(h, h if ctx.keeps else None)
        y_BTO = F.linear(value_BTF, weight_OF, bias_O)
        u_NR = None
        if a_RF is not None:
            u_NR = F.linear(value_BTF.flatten(0, -2), a_RF)
            y_BTO.flatten(0, -2).addmm_(u_NR, b_OR.t(), alpha=scale)
        read = ctx.keeps and (ctx.needs_input_grad[2] or u_NR is not None)
        # As an alias: autograd takes an input for unchanged, and h has become the slope.
        kept = h.detach() if ctx.keeps else h
        ctx.save_for_backward(value_BTF if read else None, kept, weight_OF, u_NR, a_RF, b_OR)
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
        value_NF = flat(value_BTF)
        d_weight_OF = weight_gradient(
            ctx, lambda: d_y_NO.t() @ with_padded_rows(value_NF), wanted=ctx.needs_input_grad[2]
        )
        d_value_NF = d_y_NO @ with_padded_rows(weight_OF)
        d_a_RF, d_b_OR = None, None
        if u_NR is not None:
            d_u_NR = (d_y_NO @ b_OR).mul_(ctx.scale)
            d_value_NF.addmm_(d_u_NR, a_RF)
            d_a_RF, d_b_OR = d_u_NR.t() @ value_NF, (d_y_NO.t() @ u_NR).mul_(ctx.scale)
        d_h = activation.gradient(slope, d_value_NF)
        d_bias_O = d_y_NO.sum(0) if ctx.needs_input_grad[3] else None
        return None, d_h, d_weight_OF, d_bias_O, None, None, d_a_RF, d_b_OR, None


def flat(x_BTI: Any) -> Any:
    """[N, I]; None for a tensor that forward did not save, because no gradient reads it. Typed as autograd types it."""
    return None if x_BTI is None else x_BTI.flatten(0, -2)


def is_kept(activation: Tensor) -> bool:
    """Whether a CPU keeps for backward what backward could make again from this activation.

    In fp32, making GELU and probabilities again takes 3 % of a step of GPT-2 124M and saves 250 of 3,200 MiB (4 x 256
    tokens). In bf16 there are half of the bytes to save, and it would take 8 %, because the products are faster.
    """
    return activation.dtype == torch.bfloat16 or activation.nbytes <= _SMALL_BYTES


def feed_forward(width: int, inner: int, bias: bool, activation: Activation) -> nn.Sequential:
    """A linear layer, then an activation and a second linear layer."""
    up, down = Linear(width, inner, bias), ActivatedThenLinear(inner, width, bias, activation)
    return nn.Sequential(OrderedDict(up=up, down=down))


def with_padded_rows(matrix: Tensor) -> Tensor:
    """The matrix; a copy whose rows are a cache line further apart where a product of it would be slow.

    oneDNN's fp32 kernels read a few columns of many rows. Rows three or five pages apart (the feed-forward of
    hidden_dim 768 and 1280) share their cache sets, and the kernels fall to less than half of their speed. Where the
    distance is a power of two, oneDNN copies by itself; MKL ("exact" kernels) always does.
    """
    rows, columns = matrix.shape
    distance_bytes = columns * matrix.itemsize
    harmless = distance_bytes % _PAGE_BYTES != 0 or distance_bytes.bit_count() == 1
    if harmless or matrix.dtype != torch.float32 or torch.get_float32_matmul_precision() == "highest":
        return matrix
    return matrix.new_empty(rows, columns + _LINE_BYTES // matrix.itemsize)[:, :columns].copy_(matrix)


def piece_size(x: Tensor) -> int:
    """Elements of x to compute at a time: on a CPU few enough for the caches; elsewhere all, for few operations."""
    return _PIECE if x.device.type == "cpu" else max(1, x.numel())


def _gelu(x: Tensor, out_slope: Tensor | None) -> Tensor:
    """gelu(x), and gelu'(x) = gate + gelu(x) (1 - gate) (A + 3 B x^2), gate = sigmoid(x (A + B x^2)), in `out_slope`.

    On a CPU torch evaluates tanh-GELU in 1.8 to 2.1 ns per element (one AVX-512 core), sigmoid in 0.2 to 0.4. So it is
    written by sigmoid, and the slope is made together with the value: 1.3 ns for both instead of 2.7.
    """
    y = torch.empty_like(x)
    work = torch.promote_types(x.dtype, torch.float32)
    narrow = x.dtype != work
    factor = torch.tensor(_A, dtype=work)  # a scalar in a sum of two is vectorised by torch, in addcmul it is not
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
        torch.add(factor, slope, alpha=_B, out=gate).mul_(wide).sigmoid_()
        torch.mul(wide, gate, out=value)
        if narrow:
            y_piece.copy_(value)
        if out_slope is not None:  # x itself, perhaps: it is read no more
            torch.add(factor, slope, alpha=3.0 * _B, out=slope).mul_(value)
            slope.addcmul_(slope, gate, value=-1.0)
            torch.add(slope, gate, out=slope if narrow else out_slope.view(-1)[piece])
            if narrow:
                out_slope.view(-1)[piece].copy_(slope)
    return y


GELU = Activation(
    plain=partial(F.gelu, approximate="tanh"),
    value=_gelu,
    gradient=lambda slope, d_value_NF: d_value_NF.view_as(slope).mul_(slope),
    keeps=is_kept,
)
"""GELU in its tanh form."""

EXACT_GELU = Activation(
    plain=F.gelu,
    value=lambda h, _: F.gelu(h),
    gradient=lambda h, d_value_NF: torch.ops.aten.gelu_backward(d_value_NF.view_as(h), h),
    keeps=lambda h: h.device.type != "cpu" or is_kept(h),
    reads_h=True,
)
"""GELU by the error function."""
