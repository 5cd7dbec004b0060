"""In: a rank's part of a tensor, and its offsets. Out: the class Box: a part that a checkpoint saves and loads.
Does not divide a tensor and does not know the layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from codescent.base.dtensors import is_dtensor, part_of
from codescent.checkpoint.areas import Area, pieces

Compute = Callable[[tuple[slice, ...]], torch.Tensor]
"""Computes the values of a box. The argument has a slice with start and stop, of step 1, for each dim."""


@dataclass(frozen=True)
class Box:
    """A rectangular part of a tensor of shape `shape`: `local` begins at `offsets` (an index per dim). May be empty."""

    local: torch.Tensor
    shape: torch.Size
    offsets: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the tensor."""
        return self.local.dtype

    def size(self) -> torch.Size:
        """The shape of the whole tensor."""
        return self.shape

    @property
    def area(self) -> Area:
        """Where the part lies in the whole tensor."""
        return Area(self.offsets, tuple(self.local.shape))

    @property
    def chunks(self) -> list[Area]:
        """The areas that are written one by one. A part without elements is not written; a whole tensor without is."""
        return [self.area] if self.local.numel() or self.local.shape == self.shape else []

    def values(self, area: Area) -> torch.Tensor:
        """A view of an area of the whole tensor, which is in this part."""
        found = self.local.detach()
        for dim, (first, size, begin) in enumerate(zip(*area, self.offsets, strict=True)):
            found = found.narrow(dim, first - begin, size)
        return found


@dataclass(frozen=True)
class LazyTensor(Box):
    """A whole tensor whose values are computed while they are written, some rows at a time. It cannot be loaded into.

    `local` is on the meta device and has no memory.
    """

    compute: Compute = lambda _: torch.empty(0)
    chunk_numel: int = 1 << 22

    @classmethod
    def of(cls, shape: tuple[int, ...], dtype: torch.dtype, compute: Compute) -> LazyTensor:
        """A tensor of this shape and dtype, whose values `compute` computes."""
        whole = torch.empty(shape, dtype=dtype, device="meta")
        return cls(whole, torch.Size(shape), (0,) * len(shape), compute)

    @property
    def chunks(self) -> list[Area]:
        """Areas of consecutive rows with about `chunk_numel` elements each."""
        return list(pieces(self.area, self.chunk_numel))

    def values(self, area: Area) -> torch.Tensor:
        """The values of an area."""
        return self.compute(tuple(slice(first, first + size) for first, size in zip(*area))).to(self.dtype)


def box_of(tensor: torch.Tensor | Box) -> Box:
    """The part of a tensor that this rank has, with the tensor's own memory. A plain tensor is there as a whole."""
    if isinstance(tensor, Box):
        return tensor
    local, offsets = part_of(tensor) if is_dtensor(tensor) else (tensor, (0,) * tensor.dim())
    return Box(local.detach(), tensor.shape, offsets)
