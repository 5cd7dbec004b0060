"""In: a tensor of each rank, of any length. Out: on every rank, the tensors of all ranks in one, in rank order.
Does not average (session.py does) and passes no gradient back."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from codescent.base.agreement import together
from codescent.base.counted import a_type
from codescent.base.dtensors import is_dtensor
from codescent.base.errors import UserError


@torch.no_grad()
def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """See `Ranks.gather`."""

    def look() -> tuple[str, list[int]]:  # what must be equal, and the shape
        if not isinstance(tensor, torch.Tensor):
            raise UserError(f"codescent: ranks.gather: {a_type(tensor)}: give a tensor")
        if is_dtensor(tensor):
            raise UserError("codescent: ranks.gather: a DTensor, whose parts are on several ranks: take full_tensor()")
        return f"{tensor.dtype} on {tensor.device.type}", list(tensor.shape) if tensor.dim() else [1]

    everyone = together(UserError, look)
    _refuse_differences(everyone)
    row = tensor.detach().reshape(1) if tensor.dim() == 0 else tensor.detach()
    sizes_bytes = [math.prod(shape) * row.element_size() for _, shape in everyone]
    padded = torch.zeros(max(sizes_bytes), dtype=torch.uint8, device=row.device)
    mine = row.contiguous().view(-1).view(torch.uint8)  # as bytes: backends do not know every dtype
    padded[: len(mine)] = mine
    found = [torch.empty_like(padded) for _ in everyone]
    if len(padded):
        dist.all_gather(found, padded)
    parts = [part[:size].view(row.dtype).view(shape) for part, size, (_, shape) in zip(found, sizes_bytes, everyone)]
    return torch.cat(parts)


def _refuse_differences(everyone: list[tuple[str, list[int]]]) -> None:
    """Raise the same UserError on every rank if dtypes or devices differ, or other dims than the first."""
    kind, shape = everyone[0]
    for rank, (other, sizes) in enumerate(everyone):
        if (other, sizes[1:]) != (kind, shape[1:]):
            raise UserError(
                f"codescent: ranks.gather: rank 0 has {shape} of {kind}, rank {rank} has {sizes} of {other}: only the "
                "first dim may differ"
            )
