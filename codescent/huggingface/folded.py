"""In: a model with mu-P, a function that reads its parameters. Out: the shape of a model without it that computes the
same, and its parameters: the factors of scores and logits are in the weights.
Does not write files (write.py does)."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, cast

import torch

from codescent.base.errors import UserError
from codescent.huggingface.write import Read
from codescent.models import Shape
from codescent.models.mup import KEYS


def plain_shape(shape: Shape) -> Shape:
    """The shape without mu-P, as a Hugging Face folder has it.

    Raises:
        UserError: a scaled embedding that is also the head, which no other tensor can replace.
    """
    if not shape.mup_base_dim:
        return shape
    if getattr(shape, "scale_embedding", False) and shape.growth.width != 1.0:
        raise UserError(
            "model.scale_embedding = true: mu-P multiplies embeddings by the square root of model.mup_base_dim = "
            f"{shape.mup_base_dim}, transformers by that of {shape.hidden_dim}; such a model cannot be exported"
        )
    return cast(Shape, dataclasses.replace(cast(Any, shape), **dict.fromkeys(KEYS, 0)))


class FoldedWeights:
    """The parameters of a model with mu-P, as those of a model without it that computes the same.

    The norm before the head has the factor of the logits: a tied head must not have it. Queries, or the scale of their
    norm, have the factor of the scores. Both are exact where the growth is a power of two (of four for scores), else
    each value is rounded once.

    Args:
        kind: of the model.
        shape: with mu-P.
        read: reads boxes of the trained parameters.
    """

    def __init__(self, kind: str, shape: Shape, read: Read) -> None:
        self.shape, self.read = shape, read
        self.logits, self.scores = 1.0 / shape.growth.width, 1.0 / math.sqrt(shape.growth.head)
        self.last_norm = "head.norm" if kind == "bert" else "norm"
        self.queries = "attn.q_norm." if shape.qk_norm != "none" else "attn.qkv."

    def box(self, name: str, slices: tuple[slice, ...]) -> torch.Tensor:
        """A box of a parameter. Its dtype is that of `read`."""
        values = self.read(name, slices)
        layer, _, what = name.rpartition(".")
        if layer == self.last_norm:
            return _scaled(values, self.logits, self._offset(what))
        if self.scores == 1.0 or self.queries not in name:
            return values
        if "q_norm" in name:
            return _scaled(values, self.scores, self._offset(what))
        return torch.where(self._is_query(slices[0]).view(-1, *[1] * (values.dim() - 1)), values * self.scores, values)

    def _offset(self, what: str) -> float:
        """What a norm adds to its weight."""
        return self.shape.norm_offset if what == "weight" else 0.0

    def _is_query(self, rows: slice) -> torch.Tensor:
        """Which rows of queries, keys and values are queries: in each group they are the first ones."""
        queries = self.shape.num_heads // self.shape.num_kv_heads * self.shape.head_dim
        return torch.arange(rows.start, rows.stop) % (queries + 2 * self.shape.head_dim) < queries


def _scaled(values: torch.Tensor, factor: float, offset: float) -> torch.Tensor:
    """Weights of a norm that multiplies by `offset` + weight, so that it multiplies by `factor` as much."""
    return values if factor == 1.0 else (values + offset) * factor - offset if offset else values * factor
