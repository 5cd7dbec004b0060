"""In: activations and a weight. Out: their products in 8-bit floats, with gradients; on a device, or emulated.
Does not choose the layers (strategies/fp8.py does). Products of attention, head and embedding stay in the precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from codescent.operators import products

# Shapes: N rows (tokens), K inner dimension, M columns; I inputs, O outputs. A factor multiplies values before they are
# rounded.
NARROW, WIDE_RANGE = torch.float8_e4m3fn, torch.float8_e5m2
"""4 bits of exponent and 3 of mantissa, for values; 5 and 2, for gradients (Micikevicius et al. 2022, "FP8 Formats for
Deep Learning", table 1)."""
_EXPONENTS = {NARROW: 9, WIDE_RANGE: 16}
"""The largest values, 448 and 57,344, are 0.875 times 2 to the power of these."""
_LARGEST = 0.875


@dataclass(frozen=True)
class Fp8:
    """How products are computed in fp8.

    rowwise: the rows of both operands have factors of their own, along the inner dimension; all values are NARROW, and
    the weight's gradient is computed in the precision of the run. So no factor depends on other tokens.
    tensorwise: an operand has one factor, gradients are WIDE_RANGE, and all three products are in fp8.

    Attributes:
        recipe: "rowwise" or "tensorwise".
        emulated: operands are rounded to fp8, and multiplied in their own dtype.
    """

    recipe: str
    emulated: bool

    def linear(self, x_BTI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        """x W^T + b: [B, T, O]. Differentiable."""
        y: Tensor = _Fp8Linear.apply(x_BTI, weight_OI, bias_O, self)  # type: ignore[no-untyped-call]
        return y

    def multiply(self, a_NK: Tensor, b_MK: Tensor, a_format: torch.dtype = NARROW) -> Tensor:
        """a b^T, in the dtype of a: [N, M]. b is NARROW. Not differentiable."""
        (a, a_factors), (b, b_factors) = (
            quantized(a_NK, a_format, by_row=self.recipe == "rowwise"),
            quantized(b_MK, NARROW, by_row=self.recipe == "rowwise"),
        )
        if self.emulated:
            a_wide, b_wide = a.to(a_NK.dtype) / a_factors, b.to(a_NK.dtype) / b_factors
            return products.mm(a_wide, b_wide.t())
        way = F.ScalingType.RowWise if self.recipe == "rowwise" else F.ScalingType.TensorWise
        a_scales, b_scales = a_factors.float().reciprocal(), b_factors.float().reciprocal()
        if self.recipe == "rowwise":
            b_scales = b_scales.t()
        else:
            a_scales, b_scales = a_scales.reshape(()), b_scales.reshape(())
        found = cast(Any, F).scaled_mm(a, b.t(), a_scales, way, b_scales, way, output_dtype=a_NK.dtype)
        return cast(Tensor, found)


def quantized(x_RK: Tensor, number_format: torch.dtype, *, by_row: bool) -> tuple[Tensor, Tensor]:
    """x times a factor in an 8-bit format, and the factor: [R, 1] by row, else [1, 1].

    A factor is the largest power of two with which no value is too large. So it rounds nothing by itself.
    """
    amax = x_RK.abs().amax(1, keepdim=True) if by_row else x_RK.abs().amax().reshape(1, 1)
    mantissa, exponent = torch.frexp(amax)
    power = _EXPONENTS[number_format] - exponent - (mantissa > _LARGEST).to(exponent.dtype)
    # Rows of zeros have any factor. Powers are kept where fp32 has them and their reciprocals.
    factors = torch.ldexp(torch.ones_like(amax), power.clamp(-120, 120))
    return (x_RK * factors).to(number_format), factors


class _Fp8Linear(torch.autograd.Function):
    """See `Fp8`. It saves what a product in any precision saves."""

    @staticmethod
    def forward(ctx: Any, x_BTI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, fp8: Fp8) -> Tensor:
        ctx.save_for_backward(x_BTI, weight_OI)
        ctx.fp8 = fp8
        y_NO = fp8.multiply(x_BTI.flatten(0, -2), weight_OI)
        if bias_O is not None:
            y_NO += bias_O
        return y_NO.view(*x_BTI.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y_BTO: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x_BTI, weight_OI = ctx.saved_tensors
        fp8: Fp8 = ctx.fp8
        d_y_NO, x_NI = d_y_BTO.flatten(0, -2), x_BTI.flatten(0, -2)
        by_row = fp8.recipe == "rowwise"
        d_x, d_weight_OI, d_bias_O = None, None, None
        if ctx.needs_input_grad[0]:
            d_x_NI = fp8.multiply(d_y_NO, weight_OI.t().contiguous(), NARROW if by_row else WIDE_RANGE)
            d_x = d_x_NI.view(x_BTI.shape)
        if ctx.needs_input_grad[1] and by_row:
            d_weight_OI = products.mm(d_y_NO.t(), x_NI)
        elif ctx.needs_input_grad[1]:
            d_weight_OI = fp8.multiply(d_y_NO.t().contiguous(), x_NI.t().contiguous(), WIDE_RANGE)
        if ctx.needs_input_grad[2]:
            d_bias_O = d_y_NO.sum(0)
        return d_x, d_weight_OI, d_bias_O, None
