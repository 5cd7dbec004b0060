"""In: matrices of any dtype. Out: their products in that dtype. On a processor without bf16 instructions, bf16 products
are computed in fp32: operands are widened, the result is rounded once.
Does not decide which processor that is: train/machine.py tries it at the start of a run and calls `widen_bf16`."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from codescent.operators.kept import keeping

# Shapes: N rows, K inner dimension, M columns; I inputs, O outputs; B samples, H heads, T queries, S keys, C channels.
_WIDE_ELEMENTS = 16 << 20
"""Largest number of fp32 elements (64 MiB) that a product of two matrices widens at a time. So the fp32 copy of a large
vocabulary matrix is never whole in memory."""

_PART_MULTIPLE = 64
_widens_bf16 = False


def widen_bf16(wanted: bool) -> None:
    """Compute all bf16 products of this process on the CPU in fp32, or by the processor's bf16 instructions."""
    global _widens_bf16
    _widens_bf16 = wanted


def sum_wide() -> None:
    """Sum the bf16 and fp16 products of this process in fp32 on CUDA, too, where torch would allow narrower sums.

    cuBLAS may divide a long sum among several blocks of threads (split-K). By default torch lets it round the part of
    each block to bf16 before they are added.
    """
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def widens(x: Tensor) -> bool:
    """Whether products with x are computed in fp32 and rounded."""
    return _widens_bf16 and x.dtype == torch.bfloat16 and x.device.type == "cpu"


def widened(x: Tensor) -> Tensor:
    """x in fp32 if products with x are computed in fp32; else x itself."""
    return x.float() if widens(x) else x


def linear(x_BTI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """x W^T + b, rounded once: [B, T, O]. Differentiable."""
    if not widens(x_BTI):
        return F.linear(x_BTI, weight_OI, bias_O)
    y_NO = _differentiable(x_BTI.flatten(0, -2), weight_OI.t(), bias_O)
    return y_NO.view(*x_BTI.shape[:-1], len(weight_OI))


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, differentiable. `b` has two dimensions, or the same leading dimensions as `a`."""
    if not widens(a):
        return a @ b
    if b.ndim > 2:
        return _differentiable(a, b, None)
    y_NM = _differentiable(a.flatten(0, -2), b, None)
    return y_NM.view(*a.shape[:-1], b.shape[1])


def mm(a_NK: Tensor, b_KM: Tensor, *, out: Tensor | None = None, bias_M: Tensor | None = None) -> Tensor:
    """a b + bias, into `out` if it is given: [N, M]. Not differentiable."""
    if widens(a_NK):
        return _mm(a_NK, b_KM, bias_M, out)
    if bias_M is None:
        return torch.mm(a_NK, b_KM) if out is None else torch.mm(a_NK, b_KM, out=out)
    return torch.addmm(bias_M, a_NK, b_KM) if out is None else torch.addmm(bias_M, a_NK, b_KM, out=out)


def addmm_(sum_NM: Tensor, a_NK: Tensor, b_KM: Tensor, alpha: float = 1.0) -> Tensor:
    """Add alpha a b to `sum_NM` in place and return it. Not differentiable."""
    if not widens(a_NK):
        return sum_NM.addmm_(a_NK, b_KM, alpha=alpha)
    return sum_NM.copy_(sum_NM.float().addmm_(a_NK.float(), b_KM.float(), alpha=alpha))


def add_product(sum_NM: Tensor | None, a_NK: Tensor, b_KM: Tensor, dtype: torch.dtype, alpha: float = 1.0) -> Tensor:
    """sum + alpha a b in the wide `dtype`: in place, or new memory if the sum is None. Not differentiable.

    Where torch can, the product is added before it is rounded (`sums`). Else each product is rounded to a's dtype.
    """
    how = "apart" if a_NK.dtype == dtype else sums(a_NK.device)
    if a_NK.dtype == dtype or how == "fused":
        is_first = sum_NM is None
        total_NM = a_NK.new_empty(len(a_NK), b_KM.shape[1], dtype=dtype) if sum_NM is None else sum_NM
        scales = {"beta": 0.0 if is_first else 1.0, "alpha": alpha}
        if how == "fused":
            return torch.addmm(total_NM, a_NK, b_KM, out_dtype=dtype, **scales, out=total_NM)
        return total_NM.addmm_(a_NK, b_KM, **scales)
    product_NM = torch.mm(a_NK, b_KM, out_dtype=dtype) if how == "wide" else mm(a_NK, b_KM).to(dtype)
    return product_NM.mul_(alpha) if sum_NM is None else sum_NM.add_(product_NM, alpha=alpha)


Sums = Literal["fused", "wide", "apart"]
"""How products of bf16 are added in fp32: inside of the product; apart from it, but not rounded first; rounded."""


def sums(device: torch.device) -> Sums:
    """The best way that torch has on a device. Tried once: versions of torch differ in what they accept, and where."""
    return _sums(device.type)


def _add_once(ones: Tensor) -> Tensor:
    sum_NM = torch.ones_like(ones, dtype=torch.float32)
    return torch.addmm(sum_NM, ones, ones, out_dtype=torch.float32, out=sum_NM)


@cache
def _sums(device_type: str) -> Sums:
    ones = torch.ones(16, 16, dtype=torch.bfloat16, device=device_type)
    ways: dict[Sums, Callable[[], Tensor]] = {
        "fused": lambda: _add_once(ones),
        "wide": lambda: torch.mm(ones, ones, out_dtype=torch.float32) + 1.0,
    }
    for name, way in ways.items():
        try:
            sum_NM = way()
        except (TypeError, RuntimeError):  # NotImplementedError is a RuntimeError
            continue
        if not sum_NM.is_meta and not bool((sum_NM == len(ones) + 1).all()):
            continue
        return name
    return "apart"


def bmm(a_PNK: Tensor, b_PKM: Tensor) -> Tensor:
    """The products of pairs of matrices: [P, N, M], or with more dimensions before N. Not differentiable."""
    return torch.matmul(widened(a_PNK), widened(b_PKM)).to(a_PNK.dtype)


def attention(
    q_BHTC: Tensor, k_BHSC: Tensor, v_BHSC: Tensor, seen: Tensor | None, scale: float | None = None
) -> Tensor:
    """torch's scaled_dot_product_attention: [B, H, T, C]. Differentiable. `scale` None: 1 / sqrt(C).

    Its bf16 kernel for CPUs is 5 times slower than fp32 in backward on a processor without bf16. `seen`: bool, False
    at keys that a query must not see, broadcasts to [B, H, T, S]; None: it sees all keys.
    """
    if not widens(q_BHTC):
        return F.scaled_dot_product_attention(q_BHTC, k_BHSC, v_BHSC, seen, scale=scale)
    y_BHTC: Tensor = _wide_attention(q_BHTC, k_BHSC, v_BHSC, seen, scale)[0]
    return y_BHTC


def _mm(a_NK: Tensor, b_KM: Tensor, bias_M: Tensor | None, out_NM: Tensor | None) -> Tensor:
    """See `mm`."""
    (rows, inner), columns = a_NK.shape, b_KM.shape[1]
    elements = rows * inner + inner * columns + rows * columns
    bias_M = None if bias_M is None else bias_M.float()
    if elements > _WIDE_ELEMENTS:
        out_NM = a_NK.new_empty(rows, columns) if out_NM is None else out_NM
        return _mm_in_parts(a_NK, b_KM, bias_M, out_NM, math.ceil(elements / _WIDE_ELEMENTS))
    wide_NM = _wide(a_NK.float(), b_KM.float(), bias_M)
    return wide_NM.to(a_NK.dtype) if out_NM is None else out_NM.copy_(wide_NM)


def _mm_in_parts(a_NK: Tensor, b_KM: Tensor, bias_M: Tensor | None, out_NM: Tensor, num_parts: int) -> Tensor:
    """Cut the product along its longest dimension, so that little fp32 is in memory at a time. `bias_M` is in fp32."""
    (rows, inner), columns = a_NK.shape, b_KM.shape[1]
    longest = max(rows, inner, columns)
    size = -(-longest // (num_parts * _PART_MULTIPLE)) * _PART_MULTIPLE
    parts = [slice(start, start + size) for start in range(0, longest, size)]
    if longest == columns:
        a_NK = a_NK.float()
        for part in parts:
            out_NM[:, part] = _wide(a_NK, b_KM[:, part].float(), None if bias_M is None else bias_M[part])
    elif longest == rows:
        b_KM = b_KM.float()
        for part in parts:
            out_NM[part] = _wide(a_NK[part].float(), b_KM, bias_M)
    else:
        sum_NM = a_NK.new_zeros(rows, columns, dtype=torch.float32)
        for part in parts:
            sum_NM.addmm_(a_NK[:, part].float(), b_KM[part].float())
        out_NM.copy_(sum_NM if bias_M is None else sum_NM.add_(bias_M))
    return out_NM


def _wide(a_NK: Tensor, b_KM: Tensor, bias_M: Tensor | None) -> Tensor:
    return torch.mm(a_NK, b_KM) if bias_M is None else torch.addmm(bias_M, a_NK, b_KM)


def _differentiable(a: Tensor, b: Tensor, bias_M: Tensor | None) -> Tensor:
    if torch.compiler.is_compiling() or keeping():
        compiled: Tensor = _wide_product_op(a, b, bias_M)
        return compiled
    y: Tensor = _WideProduct.apply(a, b, bias_M)  # type: ignore[no-untyped-call]
    return y


def _product(a: Tensor, b: Tensor, bias_M: Tensor | None = None) -> Tensor:
    return _mm(a, b, bias_M, None) if a.ndim == 2 else bmm(a, b)


class _WideProduct(torch.autograd.Function):
    """a b + bias. Saves the operands in bf16, and backward widens them again: no fp32 copy of a weight stays alive."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, bias_M: Tensor | None) -> Tensor:
        ctx.save_for_backward(a, b)
        return _product(a, b, bias_M)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return _product_backward(ctx, d_y)


# The same, opaque to torch.compile, which would keep the fp32 operands for backward.
@torch.library.custom_op("codescent::wide_product", mutates_args=())
def _wide_product_op(a: Tensor, b: Tensor, bias_M: Tensor | None) -> Tensor:
    return _product(a, b, bias_M)


@_wide_product_op.register_fake
def _product_shape(a: Tensor, b: Tensor, bias_M: Tensor | None) -> Tensor:
    return a.new_empty(*a.shape[:-1], b.shape[-1])


def _save_operands(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], inputs[1])


def _product_backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    a, b = ctx.saved_tensors
    wants_a, wants_b, wants_bias = ctx.needs_input_grad
    d_a = _product(d_y, b.mT) if wants_a else None
    # b is W^T: computed as its transpose, the gradient of W has the memory layout of W.
    d_b = _product(d_y.mT, a).mT if wants_b else None
    return d_a, d_b, d_y.sum(0) if wants_bias else None


_wide_product_op.register_autograd(_product_backward, setup_context=_save_operands)


@torch.library.custom_op("codescent::wide_attention", mutates_args=())
def _wide_attention(
    q_BHTC: Tensor, k_BHSC: Tensor, v_BHSC: Tensor, seen: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    """The output, and log(sum(exp(score))) of each query in fp32, for backward."""
    wide, forward = (q_BHTC.float(), k_BHSC.float(), v_BHSC.float()), torch.ops.aten
    y_BHTC, lse_BHT = forward._scaled_dot_product_flash_attention_for_cpu(*wide, attn_mask=_mask(seen), scale=scale)
    return torch.empty_like(q_BHTC).copy_(y_BHTC), lse_BHT


def _mask(seen: Tensor | None) -> Tensor | None:
    """To add to the scores: -inf at keys that a query must not see."""
    return None if seen is None else torch.zeros(seen.shape).masked_fill_(~seen, -math.inf)


@_wide_attention.register_fake
def _attention_shapes(
    q_BHTC: Tensor, k_BHSC: Tensor, v_BHSC: Tensor, seen: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q_BHTC), q_BHTC.new_empty(q_BHTC.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("codescent::wide_attention_backward", mutates_args=())
def _wide_attention_backward(
    d_y_BHTC: Tensor,
    q_BHTC: Tensor,
    k_BHSC: Tensor,
    v_BHSC: Tensor,
    y_BHTC: Tensor,
    lse_BHT: Tensor,
    seen: Tensor | None,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    wide = [tensor.float() for tensor in (d_y_BHTC, q_BHTC, k_BHSC, v_BHSC, y_BHTC)]
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    d_q, d_k, d_v = backward(*wide, lse_BHT, 0.0, False, attn_mask=_mask(seen), scale=scale)
    # In the layout that `_attention_gradient_shapes` promises to compiled code.
    return torch.empty_like(q_BHTC).copy_(d_q), torch.empty_like(k_BHSC).copy_(d_k), torch.empty_like(v_BHSC).copy_(d_v)


@_wide_attention_backward.register_fake
def _attention_gradient_shapes(
    d_y_BHTC: Tensor,
    q_BHTC: Tensor,
    k_BHSC: Tensor,
    v_BHSC: Tensor,
    y_BHTC: Tensor,
    lse_BHT: Tensor,
    seen: Tensor | None,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q_BHTC), torch.empty_like(k_BHSC), torch.empty_like(v_BHSC)


def _save_attention(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:3], *output, inputs[3])
    ctx.scale = inputs[4]


def _attention_gradients(ctx: Any, d_y_BHTC: Tensor, _d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    return *_wide_attention_backward(d_y_BHTC, *ctx.saved_tensors, ctx.scale), None, None


_wide_attention.register_autograd(_attention_gradients, setup_context=_save_attention)
