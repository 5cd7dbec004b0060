"""In: a decoder on a CPU. Out: the same decoder, whose matrices are stored as products of few tokens read them best.
Does not change a value or a shape. A decoder that also trains stays as it is: copies would not follow its weights."""

from __future__ import annotations

import torch
from torch import Tensor

from codescent.models.decoder import Decoder
from codescent.operators.head import Vocabulary
from codescent.operators.linear import Linear
from codescent.operators.reordered import Reordered, ReorderedVocabulary, has_onednn, multiplies_bf16

# Shapes: O outputs, I inputs, V vocab_size, D hidden_dim. A weight of two halves is [F, 2, I], with O = 2 F.
BIG_BYTES = 4 << 20
"""A larger matrix does not stay in the second-level caches of two cores from one token to the next."""
FEW = 3
"""Rows for which MKL reads an fp32 matrix once, as it is. With more it reorders the matrix at each call."""


@torch.no_grad()
def store_for_few_tokens_(module: Decoder, most_bytes: int) -> None:
    """Store the matrices of all linear layers and of the head for products with few tokens.

    * fp32: column by column. MKL then takes two thirds of the time for 4 to 16 tokens (1536 x 384). For those tokens a
      matrix of more than BIG_BYTES also gets a copy in oneDNN's order, which takes 0.6 to 0.8 of that (3072 x 768).
    * bf16: every matrix gets such a copy, with which products take 0.4 to 0.7 of the time.

    Measured on one core with AMX.

    Args:
        module: in evaluation mode, on a CPU.
        most_bytes: of copies. Where they reach it, the matrices that are left have none.
    """
    left = most_bytes
    for layer in module.modules():
        if isinstance(layer, Linear):
            left -= _store_(layer, left)
    if type(module.vocabulary) is Vocabulary:
        _store_head_(module, left)


def _store_(layer: Linear, most_bytes: int) -> int:
    """Store the matrix of a layer. Returns the bytes of its copy."""
    weight = layer.weight.data
    if weight.dtype != torch.bfloat16:
        layer.weight.data = _by_columns(weight)
    if not (layer.is_plain and _is_worth_a_copy(weight) and weight.nbytes <= most_bytes):
        return 0
    layer.reordered = _reordered(weight, layer.weight.data)
    return weight.nbytes


def _store_head_(module: Decoder, most_bytes: int) -> None:
    """Store the matrix of the head. An embedding that shares it reads its rows, so then there is a copy by columns."""
    weight_VD = (module.tok if module.ties_head else module.head).weight.data
    plain_VD = weight_VD if weight_VD.dtype == torch.bfloat16 else _by_columns(weight_VD)
    if not module.ties_head:
        module.head.weight.data = plain_VD
    copies = 2 if module.ties_head and plain_VD is not weight_VD else 1
    if _is_worth_a_copy(weight_VD) and copies * weight_VD.nbytes <= most_bytes:
        module.vocabulary = ReorderedVocabulary(_reordered(weight_VD, plain_VD))


def _by_columns(weight: Tensor) -> Tensor:
    return weight.flatten(0, -2).t().contiguous().t().view(weight.shape)


def _is_worth_a_copy(weight: Tensor) -> bool:
    if weight.dtype == torch.bfloat16:
        return multiplies_bf16()
    is_big = weight.dtype == torch.float32 and weight.nbytes > BIG_BYTES
    return is_big and has_onednn()


def _reordered(weight: Tensor, plain: Tensor) -> Reordered:
    if weight.dtype == torch.bfloat16:
        return Reordered(weight)
    return Reordered(weight, plain.flatten(0, -2), FEW)
