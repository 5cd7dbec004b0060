"""In: a value. Out: whether it is a DTensor of torch; the part of it that this rank has.
Does not import DTensor, which takes a while: where nobody has imported it, no value is one."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(value: Any) -> TypeGuard[DTensor]:
    """Whether a value is a DTensor."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)  # None, too, while it is imported
    return kind is not None and isinstance(value, kind)


def part_of(tensor: DTensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """The part of a DTensor that this rank has, and the index of its first element in each dim.

    A rank outside of the mesh has a part without elements; that of a scalar has one dim, of size 0.
    """
    if tensor.device_mesh.get_coordinate() is None:
        return tensor.to_local().new_empty((0,) * max(1, tensor.dim())), (0,) * tensor.dim()
    asked: Any = tensor  # torch's own checkpoints ask a tensor for its part so
    (chunk,) = asked.__create_chunk_list__()
    return tensor.to_local(), tuple(chunk.offsets)
