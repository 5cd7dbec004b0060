"""In: a rank's shard of a tensor, and its offsets. Out: the class Box: a shard that torch's DCP can save and load.
Does not shard a tensor and does not know the layout (DCP: torch.distributed.checkpoint)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

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

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:  # noqa: A002 - name of DCP
        """The chunks that DCP writes (called by DCP)."""
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, TensorProperties.create_from_tensor(self.local), self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """The chunks that DCP reads (called by DCP)."""
        if self.local.numel() == 0:
            return []
        return [ChunkStorageMetadata(offsets=torch.Size(self.offsets), sizes=self.local.shape)]

    def chunk(self, offsets: tuple[int, ...]) -> torch.Tensor:
        """The values of the chunk that begins at `offsets`. A box is one chunk."""
        return self.local


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

    def chunk(self, offsets: tuple[int, ...]) -> torch.Tensor:
        """The values of the chunk that begins at `offsets`."""
        (sizes,) = (chunk.sizes for chunk in self.__create_chunk_list__() if tuple(chunk.offsets) == tuple(offsets))
        return self.compute(tuple(slice(start, start + size) for start, size in zip(offsets, sizes))).to(self.dtype)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Chunks of consecutive rows with about `chunk_numel` elements each."""
        rows, rest = self.shape[0], tuple(self.shape[1:])
        step = max(1, self.chunk_numel // math.prod(rest))
        return [
            ChunkStorageMetadata(torch.Size((first, *(0 for _ in rest))), torch.Size((min(step, rows - first), *rest)))
            for first in range(0, rows, step)
        ]
