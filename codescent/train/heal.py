"""In: copies of tensors that differ between ranks. Out: those of a majority, on every rank.
Does not find the difference (alike.py does), and does not decide that it is repaired (saving.py does)."""

from __future__ import annotations

import torch
import torch.distributed as dist

from codescent.base.agreement import rank
from codescent.plan import Mesh
from codescent.train.alike import Copies, Diverged, by_device


def no_majority(mesh: Mesh) -> str:
    """A note where most tensors have too few copies for a majority; "": they have enough."""
    copies = mesh.dp_replicate * mesh.cp
    if copies >= 3:
        return ""
    have = "one copy" if copies == 1 else f"{copies} copies"
    return (
        f'survive.on_divergence = "heal": most tensors have {have} (parallel.dp_replicate x cp), and a majority needs '
        "three: a difference of these stops the run"
    )


@torch.no_grad()
def heal(copies: Copies, found: Diverged) -> bool:
    """Copy the tensors of the majority to the ranks that differ from it. Collective.

    Returns False, and changes nothing, if one part of the model has no majority.

    Args:
        copies: tensors of this rank, as they were compared.
        found: the differences, the same on every rank.
    """
    if not all(one.majority for one in found.differences):
        return False
    mine = by_device(copies)
    for one in found.differences:
        source = one.majority[0]
        for target in one.ranks:
            for tensor in mine.get(one.part, {}).values():  # in the same order on both ranks
                if rank() == source:
                    dist.send(tensor.cpu().contiguous(), target)
                elif rank() == target:
                    received = torch.empty(tensor.shape, dtype=tensor.dtype)
                    dist.recv(received, source)
                    tensor.copy_(received)
    return True
