"""In: activations. Out: their products with a matrix of weights, GELU before it where the feed-forward wants it.
Does not divide anything: a strategy that does puts what it sends into `before` and `after`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from codescent.operators.adapter import NONE, Adapter, add_, backward_, flat, product

# Shapes: B batch, T positions, N = B * T, I inputs, O outputs; of GELU: F its width, D outputs.
# gelu(x) = x (1 + tanh(u)) / 2 = x sigmoid(2u),  2u = x (A + B x^2)  (Hendrycks and Gimpel 2016)
_A = 2.0 * math.sqrt(2.0 / math.pi)
_B = _A * 0.044715
_PIECE = 1 << 17  # elements at a time on a CPU: the intermediate values stay in the caches of two cores

_SMALL_BYTES = 4 << 20
_PAGE_BYTES = 4096  # addresses so far apart fall into the same set of a first-level cache
_LINE_BYTES = 64

Later = list[tuple[Tensor, Callable[[], Tensor]]]
"""Weights, and how to make the gradients that a backward pass has put off.

They are the parameters themselves: what a checkpointed block unpacks in its backward pass is a copy, whose gradient
would be nobody's as soon as the block's graph is gone.
"""


class Linear(nn.Module):
    """x W^T + b, and what an adapter beside W adds (see `adapter`).

    Attributes:
        lora_a, lora_b: the adapter's two matrices; None: there is none.
        scale: what the adapter's product is multiplied by.
        before: what is done to x first, where the weight is divided; None: nothing.
        after: what is done to x W^T, before the bias is added.
        first_output: number of the first of its outputs that are here, where the weight is divided by them.
        later: where the backward pass puts the product that makes the weight's gradient, instead of making it; None:
            it is made at once.
    """

    def __init__(self, inputs: int, outputs: int, bias: bool, device: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, device=device))
        self.bias = nn.Parameter(torch.empty(outputs, device=device)) if bias else None
        self.lora_a: nn.Parameter | None
        self.lora_b: nn.Parameter | None
        self.register_parameter("lora_a", None)
        self.register_parameter("lora_b", None)
        self.scale = 0.0
        self.before: Callable[[Tensor], Tensor] | None = None
        self.after: Callable[[Tensor], Tensor] | None = None
        self.first_output = 0
        self.later: Later | None = None

    def forward(self, x_BTI: Tensor) -> Tensor:
        """[B, T, O]."""
        if self.before is not None:
            x_BTI = self.before(x_BTI)
        if self.after is None:
            return self._product(x_BTI, self.bias)
        y_BTO = self.after(self._product(x_BTI, None))
        return y_BTO if self.bias is None else y_BTO + self.bias

    @property
    def adapter(self) -> Adapter:
        """Beside the weight."""
        return NONE if self.lora_a is None else Adapter(self.lora_a, self.lora_b, self.scale)

    def _product(self, x_BTI: Tensor, bias_O: Tensor | None) -> Tensor:
        if self.later is None:
            return product(x_BTI, self.weight, bias_O, self.adapter)
        y_BTO: Tensor = LaterLinear.apply(x_BTI, self.weight, bias_O, self.later)  # type: ignore[no-untyped-call]
        return y_BTO


class GeluThenLinear(Linear):
    """gelu(x) W^T + b, GELU in its tanh form. Nobody else may read x: its memory is used again.

    Attributes:
        recompute: make GELU again in the backward pass.
    """

    def __init__(self, inputs: int, outputs: int, bias: bool, device: str) -> None:
        super().__init__(inputs, outputs, bias, device)
        self.recompute = False

    def _product(self, x_BTI: Tensor, bias_O: Tensor | None) -> Tensor:
        return gelu_linear_(x_BTI, self.weight, bias_O, self.recompute, self.later, self.adapter)


class LaterLinear(torch.autograd.Function):
    """x W^T + b, whose backward pass gives the gradient of x and puts that of W off (Qi et al. 2023, section 2)."""

    @staticmethod
    def forward(ctx: Any, x_BTI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, later: Later) -> Tensor:
        """See `Linear`."""
        ctx.save_for_backward(x_BTI, weight_OI)
        ctx.later, ctx.parameter = later, weight_OI
        return F.linear(x_BTI, weight_OI, bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y_BTO: Tensor) -> tuple[Tensor, None, Tensor | None, None]:
        """The gradients of x and of the bias."""
        x_BTI, weight_OI = ctx.saved_tensors
        d_y_NO = d_y_BTO.flatten(0, -2)
        ctx.later.append((ctx.parameter, lambda: d_y_NO.t() @ x_BTI.flatten(0, -2)))
        return d_y_BTO @ weight_OI, None, d_y_NO.sum(0) if ctx.needs_input_grad[2] else None, None


def is_kept(activation: Tensor) -> bool:
    """Whether a CPU keeps for the backward pass what it can make again from this activation.

    In fp32 to make GELU and probabilities again is 3 % of a step of GPT-2 124M and saves 250 of 3,200 MiB (4 x 256
    tokens); bf16 has half of the bytes to save, and beside its faster products it would be 8 %.
    """
    return activation.dtype == torch.bfloat16 or activation.nbytes <= _SMALL_BYTES


def gelu_linear_(
    h_BTF: Tensor,
    weight_DF: Tensor,
    bias_D: Tensor | None,
    recompute: bool = False,
    later: Later | None = None,
    adapter: Adapter = NONE,
) -> Tensor:
    """gelu(h) weight^T + bias, GELU in its tanh form: [B, T, D]. Nobody else may read h: its memory is used again.

    On a CPU torch evaluates tanh-GELU in 1.8 to 2.1 ns an element (one AVX-512 core), sigmoid in 0.2 to 0.4. So GELU is
    written by sigmoid there, and its slope is made together with the value: 1.3 ns for both instead of 2.7. The two are
    a layer's largest activations: where `is_kept` says no, only h is kept and they are made again.

    Args:
        h_BTF: contiguous.
        recompute: keep h alone for the backward pass.
        later: see `Linear`.
        adapter: beside the weight.
    """
    if torch.compiler.is_compiling() or (h_BTF.device.type != "cpu" and not recompute and later is None):
        return product(F.gelu(h_BTF, approximate="tanh"), weight_DF, bias_D, adapter)
    y_BTD: Tensor = GeluLinear.apply(h_BTF, weight_DF, bias_D, recompute, later, *adapter)  # type: ignore[no-untyped-call]
    return y_BTD


class GeluLinear(torch.autograd.Function):
    """See `gelu_linear_`."""

    @staticmethod
    def forward(
        ctx: Any,
        h_BTF: Tensor,
        weight_DF: Tensor,
        bias_D: Tensor | None,
        recompute: bool,
        later: Later | None,
        *adapter: Any,
    ) -> Tensor:
        """See `gelu_linear_`."""
        ctx.later, ctx.parameter, ctx.scale = later, weight_DF, adapter[-1]
        ctx.keeps = any(ctx.needs_input_grad) and not recompute and is_kept(h_BTF)
        value_BTF = _gelu_and_slope(h_BTF, out_slope=h_BTF) if ctx.keeps else _gelu(h_BTF)
        y_BTD = F.linear(value_BTF, weight_DF, bias_D)
        u_NR = add_(y_BTD.flatten(0, -2), value_BTF.flatten(0, -2), Adapter(*adapter))
        read = ctx.keeps and (ctx.needs_input_grad[1] or u_NR is not None)
        # As an alias: autograd takes an input for unchanged, and h has become the slope.
        kept_BTF = h_BTF.detach() if ctx.keeps else h_BTF
        ctx.save_for_backward(value_BTF if read else None, kept_BTF, weight_DF, u_NR, *adapter[:-1])
        return y_BTD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y_BTD: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of h, weight, bias and adapter."""
        value_BTF, slope_BTF, weight_DF, u_NR, a_RF, b_DR = ctx.saved_tensors
        if not ctx.keeps:
            h_BTF, slope_BTF = slope_BTF, torch.empty_like(slope_BTF)
            value_BTF = _gelu_and_slope(h_BTF, out_slope=slope_BTF)
        d_y_ND, value_NF = flat(d_y_BTD), flat(value_BTF)
        d_weight_DF = None
        if ctx.later is not None:
            ctx.later.append((ctx.parameter, lambda: d_y_ND.t() @ apart(value_NF)))
        elif ctx.needs_input_grad[1]:
            d_weight_DF = d_y_ND.t() @ apart(value_NF)
        d_value_NF = d_y_ND @ apart(weight_DF)
        d_adapter = backward_(d_y_ND, value_NF, u_NR, Adapter(a_RF, b_DR, ctx.scale), d_value_NF)
        d_h_BTF = d_value_NF.view_as(slope_BTF).mul_(slope_BTF)
        d_bias_D = d_y_ND.sum(0) if ctx.needs_input_grad[2] else None
        return d_h_BTF, d_weight_DF, d_bias_D, None, None, *d_adapter, None


def apart(matrix: Tensor) -> Tensor:
    """The matrix, copied with its rows a cache line further apart where a product would find them in each other's way.

    oneDNN's fp32 kernels read a few columns of many rows. Where these are three or five pages apart (the feed-forward
    of hidden_dim 768 and 1280) they share their cache sets, and the kernels fall to less than half of their speed;
    where the distance is a power of two they copy by themselves, and MKL ("exact" kernels) always does.
    """
    rows, columns = matrix.shape
    distance_bytes = columns * matrix.itemsize
    harmless = distance_bytes % _PAGE_BYTES != 0 or distance_bytes.bit_count() == 1
    if harmless or matrix.dtype != torch.float32 or torch.get_float32_matmul_precision() == "highest":
        return matrix
    return matrix.new_empty(rows, columns + _LINE_BYTES // matrix.itemsize)[:, :columns].copy_(matrix)


def _gelu(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    factor = torch.tensor(_A, dtype=torch.promote_types(x.dtype, torch.float32))
    size = _piece_size(x)
    for x_piece, y_piece in zip(torch.split(x.view(-1), size), torch.split(y.view(-1), size), strict=True):
        wide = x_piece.to(factor.dtype)
        gate = torch.add(factor, wide * wide, alpha=_B).mul_(wide).sigmoid_()
        y_piece.copy_(gate.mul_(wide))
    return y


def _gelu_and_slope(x: Tensor, out_slope: Tensor) -> Tensor:
    """gelu(x), and gelu'(x) = gate + gelu(x) (1 - gate) (A + 3 B x^2), gate = sigmoid(x (A + B x^2)), in `out_slope`.

    `out_slope` may be x.
    """
    y = torch.empty_like(x)
    work = torch.promote_types(x.dtype, torch.float32)
    narrow = x.dtype != work
    factor = torch.tensor(_A, dtype=work)  # a scalar in a sum of two is vectorised by torch, in addcmul it is not
    size = _piece_size(x)
    scratch = x.new_empty(4 if narrow else 2, min(size, x.numel()), dtype=work)
    for start in range(0, x.numel(), size):
        x_piece, y_piece, out_piece = (tensor.view(-1)[start : start + size] for tensor in (x, y, out_slope))
        gate, slope, *wider = scratch[:, : len(x_piece)].unbind()
        wide, value = wider if narrow else (x_piece, y_piece)
        if narrow:
            wide.copy_(x_piece)
        torch.mul(wide, wide, out=slope)
        torch.add(factor, slope, alpha=_B, out=gate).mul_(wide).sigmoid_()
        torch.mul(wide, gate, out=value)
        torch.add(factor, slope, alpha=3.0 * _B, out=slope).mul_(value)
        slope.addcmul_(slope, gate, value=-1.0)
        if narrow:
            y_piece.copy_(value)
            out_piece.copy_(slope.add_(gate))
        else:
            torch.add(slope, gate, out=out_piece)
    return y


def _piece_size(x: Tensor) -> int:
    """Elements at a time; elsewhere than on a CPU all, where the number of operations counts."""
    return _PIECE if x.device.type == "cpu" else max(1, x.numel())
