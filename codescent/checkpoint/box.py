"""In: this rank's box of a tensor. Out: the same, as torch's distributed checkpoint (DCP) writes and reads it.
Does not divide anything and does not know the layout."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

Make = Callable[[tuple[slice, ...]], torch.Tensor]
"""Makes the values of a box: a slice of step 1, with both ends, for each dim."""


@dataclass(frozen=True)
class Box:
    """A box of a larger tensor: `local` begins at `offsets` of a whole of this `shape`; it may be empty."""

    local: torch.Tensor
    shape: torch.Size
    offsets: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        """The whole's dtype, and every box's."""
        return self.local.dtype

    def size(self) -> torch.Size:
        """The shape of the whole."""
        return self.shape

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:  # noqa: A002 - DCP calls it so
        """The chunks that DCP writes."""
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, TensorProperties.create_from_tensor(self.local), self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """The chunks that DCP reads."""
        if self.local.numel() == 0:
            return []
        return [ChunkStorageMetadata(offsets=torch.Size(self.offsets), sizes=self.local.shape)]

    def chunk(self, offsets: tuple[int, ...]) -> torch.Tensor:
        """The values to write of the chunk that begins at `offsets`: a box is one chunk."""
        return self.local


@dataclass(frozen=True)
class LazyTensor(Box):
    """A whole tensor whose values are made when they are written, some rows at a time; it cannot be read into.

    `local` is on the meta device and has no memory.
    """

    make: Make = lambda _: torch.empty(0)
    chunk_numel: int = 1 << 22

    @classmethod
    def of(cls, shape: tuple[int, ...], dtype: torch.dtype, make: Make) -> LazyTensor:
        """A tensor of this shape and dtype."""
        whole = torch.empty(shape, dtype=dtype, device="meta")
        return cls(whole, torch.Size(shape), (0,) * len(shape), make)

    def chunk(self, offsets: tuple[int, ...]) -> torch.Tensor:
        """The values of the chunk that begins at `offsets`."""
        (sizes,) = (chunk.sizes for chunk in self.__create_chunk_list__() if tuple(chunk.offsets) == tuple(offsets))
        return self.make(tuple(slice(start, start + size) for start, size in zip(offsets, sizes))).to(self.dtype)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Rows of about `chunk_numel` elements."""
        rows, rest = self.shape[0], tuple(self.shape[1:])
        step = max(1, self.chunk_numel // math.prod(rest))
        return [
            ChunkStorageMetadata(torch.Size((first, *(0 for _ in rest))), torch.Size((min(step, rows - first), *rest)))
            for first in range(0, rows, step)
        ]
