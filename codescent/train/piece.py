"""In: this rank's part of a tensor that is divided over ranks. Out: the same, as torch's distributed checkpoint has it.
Does not divide anything and does not know how the others are laid out: a part says where in the whole it is."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


@dataclass(frozen=True)
class Piece:
    """A box of a larger tensor: `local` begins at `offsets` of a whole of this `shape`. An empty one is nowhere."""

    local: torch.Tensor
    shape: torch.Size
    offsets: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        """Of the whole and of every part."""
        return self.local.dtype

    def size(self) -> torch.Size:
        """The shape of the whole."""
        return self.shape

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:  # noqa: A002 - DCP calls it so
        """What DCP writes of it."""
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, TensorProperties.create_from_tensor(self.local), self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """What DCP reads into it."""
        if self.local.numel() == 0:
            return []
        return [ChunkStorageMetadata(offsets=torch.Size(self.offsets), sizes=self.local.shape)]
