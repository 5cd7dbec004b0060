"""In: the vocabulary matrix and tokens. Out: their rows, and a port through which the head hands in its gradient.
Does not know the head: whoever reads the same matrix may use the port."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

# Shapes: B samples, T positions, D hidden_dim, V vocab_size.
_ONE_HOT_VOCAB = 1024  # up to this vocabulary a product with one-hot rows adds more exactly, and sooner


def tied_embedding(weight_VD: Tensor, tokens_BT: Tensor, port_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows of a matrix that the head reads too, so that its gradient is made once.

    Autograd would make a second dense gradient [V, D] for the embedding, of zeros and a few rows, and add the two.
    Here the head's gradient comes in through the port, and the embedding's rows are added to it in place.

    Args:
        weight_VD: the matrix.
        tokens_BT: int64.
        port_dtype: dtype in which the head hands its gradient in; where it is wider than the weight's, the sum is
            made in it and rounded once.

    Returns:
        x_BTD, and the port [V, D]: zeros that take no memory, whose gradient is the head's share of the weight's.
    """
    out: tuple[Tensor, Tensor] = TiedEmbedding.apply(weight_VD, tokens_BT, port_dtype)  # type: ignore[no-untyped-call]
    return out


class TiedEmbedding(torch.autograd.Function):
    """See `tied_embedding`."""

    @staticmethod
    def forward(ctx: Any, weight_VD: Tensor, tokens_BT: Tensor, port_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """See `tied_embedding`."""
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(tokens_BT)
        ctx.like_weight = (weight_VD.shape, weight_VD.dtype)
        return F.embedding(tokens_BT, weight_VD), weight_VD.new_zeros((), dtype=port_dtype).expand(weight_VD.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_x_BTD: Tensor | None, d_port_VD: Tensor | None) -> tuple[Tensor | None, None, None]:
        """The gradient of the matrix: the port's, with the rows of the tokens added in place."""
        shape, dtype = ctx.like_weight
        if d_x_BTD is None:
            return (None if d_port_VD is None else d_port_VD.to(dtype)), None, None
        total_VD = d_x_BTD.new_zeros(shape) if d_port_VD is None else d_port_VD
        tokens_N, rows_ND = ctx.saved_tensors[0].flatten(), d_x_BTD.flatten(0, -2)
        if shape[0] <= _ONE_HOT_VOCAB:
            hot_NV = rows_ND.new_zeros(len(tokens_N), shape[0]).scatter_(1, tokens_N[:, None], 1.0)
            total_VD.addmm_(hot_NV.t().to(total_VD.dtype), rows_ND.to(total_VD.dtype))
        else:
            total_VD.index_add_(0, tokens_N, rows_ND.to(total_VD.dtype))
        return total_VD.to(dtype), None, None
