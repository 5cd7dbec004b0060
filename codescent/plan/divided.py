"""In: nothing. Out: `Dim`, what a dim of a tensor counts; `Divided`: a tensor of which ranks have parts.
Does not know which strategy divides a dim (strategies do)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from enum import StrEnum
from typing import Any, Self, cast

from codescent.plan.shard import Placement


class Dim(StrEnum):
    """What a dim of a tensor of a forward pass counts. Strategies read it to divide the tensor."""

    SAMPLE = "sample"  # samples of a micro-batch
    SEQUENCE = "sequence"  # positions of the residual stream: divided by cp, and by tp with sequence_parallel
    POSITION = "position"  # positions that a layer reads: divided by cp only
    TOKEN = "token"  # positions whose tokens an embedding looks up: divided by cp only
    COLUMN = "column"  # heads, channels or rows of a matrix that tp divides
    WHOLE = "whole"  # what no strategy divides


class Divided:
    """A dataclass with the shape of the undivided tensor, what its dims count, and how the ranks divide it."""

    shape: tuple[int, ...]
    dims: tuple[Dim, ...]
    placement: Placement

    def divided(self, axis: str, dims: Iterable[Dim]) -> Self:
        """This tensor with its first dim of these kinds divided over a mesh axis; itself if it has no such dim."""
        at = next((number for number, dim in enumerate(self.dims) if dim in tuple(dims)), None)
        if at is None:
            return self
        return cast(Self, replace(cast(Any, self), placement=Placement({**self.placement.shards, axis: at})))
