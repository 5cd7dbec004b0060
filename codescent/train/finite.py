"""In: tensors in the host's memory. Out: whether all their numbers are finite.
Does not use the threads of torch: it runs beside training (Optimizer.is_finite is for a rank that waits)."""

from __future__ import annotations

from collections.abc import Collection

import torch

PIECE_NUMEL = 1 << 14
"""Elements of one sum. Torch divides a sum of more than 32,768 among its threads."""


@torch.no_grad()
def all_finite(tensors: Collection[torch.Tensor]) -> bool:
    """Whether all numbers are finite. Reads each tensor once. The tensors are contiguous."""
    pieces = (piece for tensor in tensors for piece in torch.split(tensor.reshape(-1), PIECE_NUMEL))
    # a finite sum has finite summands only
    return all(bool(piece.sum().isfinite()) or bool(piece.isfinite().all()) for piece in pieces)
