"""In: activations x; W, b, a LoRA adapter. Out: x W^T + b + the adapter's product. The gradient of W can wait until a
later instruction computes it (zero-bubble pipeline).
Does not split W over ranks: strategies do, and set functions that the layer calls before and after the product."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from codescent.operators import products
from codescent.operators.compiled import plain_inference
from codescent.operators.dropout import drop
from codescent.operators.fp8 import Fp8
from codescent.operators.nf4 import Packed
from codescent.operators.reordered import Reordered
from codescent.plan.activations import SMALL_BYTES

# Shapes: B batch, T positions, N = B * T, I inputs, O outputs, R the adapter's rank.

_ROWS_NUMEL = 1 << 24
"""Elements of a matrix whose rows are measured at a time: 64 MiB in fp32."""

Deferred = list[tuple[Tensor, "partial[Tensor]"]]
"""Weights whose gradients a backward pass has deferred, each with the function that computes the gradient.

The arguments of the function are the tensors that wait with it.

The list holds the parameters themselves. In the backward pass of a checkpointed block, the unpacked weight is a copy.
A gradient of the copy would be lost as soon as the graph of the block is freed.
"""


class Drops(NamedTuple):
    """Dropout of what an adapter reads; the matrix beside it reads everything.

    Attributes:
        keys_B: the key of each sample at this adapter.
        probability: of being dropped.
        rows_T: positions of the rows in the whole sequence; None: all.
        first_input: index of the first input of this rank.
    """

    keys_B: Tensor
    probability: float
    rows_T: Tensor | None
    first_input: int

    def __call__(self, x_BTI: Tensor) -> Tensor:
        """x after dropout. It is linear and its own adjoint: it maps gradients of the output to those of x, too."""
        return drop(x_BTI, self.keys_B, self.probability, self.rows_T, self.first_input)


class Adapter(NamedTuple):
    """A LoRA adapter: scale * B A is added to a matrix W (Hu et al. 2021, "LoRA", equation 3).

    For a weight [O, 2, I], B is [O, 2, R]. `drops`: dropout of what A reads; None: there is none.
    """

    a_RI: Tensor
    b_OR: Tensor
    scale: float
    drops: Drops | None = None


NO_ADAPTER = (None, None, 0.0, None)


class Linear(nn.Module):
    """x W^T + b, plus the product of the adapter if the layer has one.

    Attributes:
        lora_a, lora_b: the two matrices of the adapter; None: no adapter.
        scale: factor on the product of the adapter.
        lora_magnitude: the lengths of the rows of W + scale B A (DoRA); None: they are as they are.
        fp8: computes the products in 8-bit floats; None: they are in the dtype of x.
        packed: gives the frozen weight, which is held in few bits; None: `weight` is what products read.
        reordered: computes the product in passes of the engine, by a copy of the weight; None: `weight` is read.
        sum_ranks: function that adds squares of lengths over ranks; None: no function. Set if the inputs are split.
        adapter_dropout: probability of dropout of what the adapter reads.
        adapter_keys_B: see `Drops`; set for each micro-batch.
        adapter_rows_T: see `Drops`.
        reads_rows: whether it reads the rows of the residual stream that a rank has, and not all that it reads of.
        first_input: index of the first input of this rank, if the inputs are split over ranks.
        before: function applied to x first; None: no function. Set if the outputs are split over ranks.
        after: function applied to x W^T before the bias is added; None: no function. Set if the inputs are split.
        first_output: index of the first output of this rank, if the outputs are split over ranks.
        deferred: list to which backward appends the function that computes the weight's gradient; None: backward
            computes it at once.
    """

    def __init__(self, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None
        self.lora_a: nn.Parameter | None
        self.lora_b: nn.Parameter | None
        self.register_parameter("lora_a", None)
        self.register_parameter("lora_b", None)
        self.lora_magnitude: nn.Parameter | None
        self.register_parameter("lora_magnitude", None)
        self.packed: Packed | None = None
        self.fp8: Fp8 | None = None
        self.reordered: Reordered | None = None
        self.sum_ranks: Callable[[Tensor], Tensor] | None = None
        self.scale, self.adapter_dropout, self.first_input = 0.0, 0.0, 0
        self.adapter_keys_B: Tensor | None = None
        self.adapter_rows_T: Tensor | None = None
        self.reads_rows = False
        self.before: Callable[[Tensor], Tensor] | None = None
        self.after: Callable[[Tensor], Tensor] | None = None
        self.first_output = 0
        self.deferred: Deferred | None = None

    def forward(self, x_BTI: Tensor) -> Tensor:
        """[B, T, O]."""
        if self.before is not None:
            x_BTI = self.before(x_BTI)
        if self.after is None and self.lora_magnitude is None:
            return self._product(x_BTI, self.bias)
        y_BTO = self._product(x_BTI, None)
        if self.lora_magnitude is not None:
            y_BTO = self._with_magnitude(y_BTO, self.lora_magnitude)
        if self.after is not None:
            y_BTO = self.after(y_BTO)
        return y_BTO if self.bias is None else y_BTO + self.bias

    @property
    def adapter(self) -> Adapter | None:
        """The adapter; None: the layer has no adapter."""
        if self.lora_a is None or self.lora_b is None:
            return None
        return Adapter(self.lora_a, self.lora_b, self.scale, self._drops())

    def _drops(self) -> Drops | None:
        """None: the adapter has no dropout, or the layer is not in training."""
        if not (self.training and self.adapter_dropout):
            return None
        assert self.adapter_keys_B is not None, "training with dropout: call set_dropout_context first"
        return Drops(self.adapter_keys_B, self.adapter_dropout, self.adapter_rows_T, self.first_input)

    def _with_magnitude(self, y: Tensor, magnitude: Tensor) -> Tensor:
        adapter = self.adapter
        assert adapter is not None
        squares = squared_lengths(unpacked(self.weight, self.packed), adapter)
        lengths = (squares if self.sum_ranks is None else self.sum_ranks(squares)).sqrt()
        if torch.compiler.is_compiling():
            return y * _of_outputs((magnitude.to(lengths.dtype) / lengths).to(y.dtype))
        scaled: Tensor = _WithMagnitude.apply(y, magnitude, lengths)  # type: ignore[no-untyped-call]
        return scaled

    @property
    def is_plain(self) -> bool:
        """Whether it is x W^T + b of `weight` as it is: no adapter, no 8-bit products, nothing packed."""
        return self.fp8 is None and self.packed is None and self.lora_a is None

    def _product(self, x_BTI: Tensor, bias_O: Tensor | None) -> Tensor:
        if self.reordered is not None and plain_inference():
            return self.reordered.linear(x_BTI, bias_O)
        if self.fp8 is not None:
            return self.fp8.linear(x_BTI, self.weight, bias_O)
        if self.deferred is None:
            return product(x_BTI, self.weight, bias_O, self.adapter, self.packed)
        y_BTO: Tensor = _DeferredLinear.apply(x_BTI, self.weight, bias_O, self.deferred)  # type: ignore[no-untyped-call]
        return y_BTO


def product(
    x_BTI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, adapter: Adapter | None, packed: Packed | None = None
) -> Tensor:
    """x W^T + b + scale (x A^T) B^T: [B, T, O], with gradients by autograd. `packed`: see `Linear`."""
    if adapter is None:
        return _of_weight(x_BTI, weight_OI, bias_O, packed)
    x_NI = x_BTI.flatten(0, -2)
    y_NO = _of_weight(x_NI, weight_OI, bias_O, packed)
    u_NR = products.linear(x_NI, adapter.a_RI) if adapter.drops is None else _down(x_BTI, adapter, adapter.drops)
    # In place, because y has no other reader: this saves two passes over y.
    if products.widens(x_NI):
        y_NO = y_NO.add_(products.linear(u_NR, adapter.b_OR), alpha=adapter.scale)
    else:
        y_NO = y_NO.addmm_(u_NR, adapter.b_OR.t(), alpha=adapter.scale)
    return y_NO.view(*x_BTI.shape[:-1], -1)


def add_product(sum_NI: Tensor, d_u_NR: Tensor, a_RI: Tensor, like_BTI: Tensor, drops: Drops | None) -> None:
    """Add the gradient of what an adapter reads, d_u A, with its dropout."""
    if drops is None:
        products.addmm_(sum_NI, d_u_NR, a_RI)
    else:
        sum_NI.add_(drops(products.mm(d_u_NR, a_RI).view_as(like_BTI)).flatten(0, -2))


def unpacked(weight: Tensor, packed: Packed | None) -> Tensor:
    """The weight that products read."""
    return weight if packed is None else packed(weight)


def _of_weight(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None, packed: Packed | None) -> Tensor:
    if packed is None:
        return products.linear(x, weight_OI, bias_O)
    y: Tensor = _PackedProduct.apply(x, weight_OI, bias_O, packed)  # type: ignore[no-untyped-call]
    return y


class _PackedProduct(torch.autograd.Function):
    """x W^T + b of a frozen W in few bits. Forward and backward unpack it, so that it is never kept whole."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None, packed: Packed) -> Tensor:
        ctx.save_for_backward(weight_OI)
        ctx.packed = packed
        return products.linear(x, packed(weight_OI), bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor, None, Tensor | None, None]:
        (weight_OI,) = ctx.saved_tensors
        d_x = products.mm(d_y.flatten(0, -2), ctx.packed(weight_OI)).view(*d_y.shape[:-1], -1)
        return d_x, None, d_y.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None, None


def _down(x_BTI: Tensor, adapter: Adapter, drops: Drops) -> Tensor:
    """x A^T with the adapter's dropout of x: [N, R]."""
    if torch.compiler.is_compiling():
        return products.linear(drops(x_BTI).flatten(0, -2), adapter.a_RI)
    u_NR: Tensor = _DroppedProduct.apply(x_BTI, adapter.a_RI, drops)  # type: ignore[no-untyped-call]
    return u_NR


def dropped(x_BTI: Tensor, drops: Drops | None) -> Tensor:
    """x after the dropout of an adapter: [N, I]. Not differentiable."""
    return (x_BTI if drops is None else drops(x_BTI)).flatten(0, -2)


class _DroppedProduct(torch.autograd.Function):
    """drops(x) A^T. Saves x, which the adapter keeps in any case, and drops again in backward."""

    @staticmethod
    def forward(ctx: Any, x_BTI: Tensor, a_RI: Tensor, drops: Drops) -> Tensor:
        ctx.save_for_backward(x_BTI, a_RI)
        ctx.drops = drops
        return products.linear(dropped(x_BTI, drops), a_RI)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_u_NR: Tensor) -> tuple[Tensor, Tensor, None]:
        x_BTI, a_RI = ctx.saved_tensors
        d_a_RI = products.mm(d_u_NR.t(), dropped(x_BTI, ctx.drops))
        return ctx.drops(products.mm(d_u_NR, a_RI).view_as(x_BTI)), d_a_RI, None


@torch.no_grad()
def squared_lengths(weight: Tensor, adapter: Adapter) -> Tensor:
    """The squared length of each row of W + scale B A: [O], or [F, 2] of two halves. A constant for gradients.

    Liu et al. 2024, "DoRA", section 4.3. It is computed in at least fp32, some rows at a time.
    """
    wide = torch.promote_types(weight.dtype, torch.float32)
    a_RI, rows, columns = adapter.a_RI.to(wide), weight.flatten(0, -2), adapter.b_OR.flatten(0, -2)
    step = max(1, _ROWS_NUMEL // rows.shape[1])
    found = []
    for first in range(0, len(rows), step):
        part = slice(first, first + step)
        sums_OI = torch.addmm(rows[part].to(wide), columns[part].to(wide), a_RI, alpha=adapter.scale)
        found.append(sums_OI.square_().sum(-1))
    return torch.cat(found).view(weight.shape[:-1])


def _of_outputs(numbers: Tensor) -> Tensor:
    """A number of each output, so that it multiplies outputs: [O], or [2, 1, 1, F] of [F, 2]."""
    return numbers if numbers.ndim == 1 else numbers.t()[:, None, None]


class _WithMagnitude(torch.autograd.Function):
    """y m / |W + scale B A|, of each row of the matrix (Liu et al. 2024, "DoRA", equations 5 and 11)."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, magnitude: Tensor, lengths: Tensor) -> Tensor:
        ctx.save_for_backward(y, magnitude, lengths)
        return y * _of_outputs((magnitude.to(lengths.dtype) / lengths).to(y.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_scaled: Tensor) -> tuple[Tensor, Tensor, None]:
        y, magnitude, lengths = ctx.saved_tensors
        d_y = d_scaled * _of_outputs((magnitude.to(lengths.dtype) / lengths).to(y.dtype))
        halves = magnitude.ndim - 1
        sums = (d_scaled * y).flatten(halves, -2).sum(halves, dtype=lengths.dtype)
        return d_y, ((sums.t() if halves else sums) / lengths).to(magnitude.dtype), None


def weight_gradient(ctx: Any, make: partial[Tensor], *, wanted: bool) -> Tensor | None:
    """The gradient of `ctx.parameter`. None if it is not wanted, or if `make` was appended to `ctx.deferred`."""
    if ctx.deferred is not None:
        ctx.deferred.append((ctx.parameter, make))
        return None
    return make() if wanted else None


def _weight_product(d_y_NO: Tensor, x_BTI: Tensor) -> Tensor:
    return products.mm(d_y_NO.t(), x_BTI.flatten(0, -2))


class _DeferredLinear(torch.autograd.Function):
    """x W^T + b; backward computes the gradient of x, defers that of W (Qi et al. 2023, "Zero Bubble", section 2)."""

    @staticmethod
    def forward(ctx: Any, x_BTI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, deferred: Deferred) -> Tensor:
        ctx.save_for_backward(x_BTI, weight_OI)
        ctx.deferred, ctx.parameter = deferred, weight_OI
        return products.linear(x_BTI, weight_OI, bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y_BTO: Tensor) -> tuple[Tensor, None, Tensor | None, None]:
        x_BTI, weight_OI = ctx.saved_tensors
        d_y_NO = d_y_BTO.flatten(0, -2)
        weight_gradient(ctx, partial(_weight_product, d_y_NO, x_BTI), wanted=True)
        return products.matmul(d_y_BTO, weight_OI), None, d_y_NO.sum(0) if ctx.needs_input_grad[2] else None, None


def is_kept(activation: Tensor) -> bool:
    """Whether forward on a CPU saves the values that backward could recompute from this activation.

    In fp32, recomputing GELU and probabilities takes 3 % of a step of GPT-2 124M and saves 250 of 3,200 MiB (4 x 256
    tokens). In bf16 it would save half as many bytes and take 8 %, because the matrix products are faster.
    """
    return activation.dtype == torch.bfloat16 or activation.nbytes <= SMALL_BYTES
