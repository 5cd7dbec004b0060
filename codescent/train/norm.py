"""In: gradients. Out: their Euclidean norm, as a number or, squared, on their device.
Does not sum over ranks (execute.py does) and does not clip (optimize.py does)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from codescent.base.device import wide_dtype

NORM_CHUNK = 2**19
"""Elements cast to fp32 at a time for the norm of bf16 gradients on a CPU: 2 MiB, which fits in cache."""


def gradient_norm(gradients: Sequence[torch.Tensor]) -> float:
    """The Euclidean norm of all gradients, as one vector; bf16 gradients are summed in fp32. Waits for the device."""
    if gradients[0].device.type != "cpu":
        return math.sqrt(square_on_device(gradients))
    if gradients[0].dtype != torch.bfloat16:
        return float(torch.nn.utils.get_total_norm(gradients))
    # On a CPU, vector_norm of bf16 with fp32 sums is nine times slower than this cast of cache-sized pieces.
    squares = 0.0
    for gradient in gradients:
        for piece in torch.split(gradient.reshape(-1), NORM_CHUNK):
            wide = piece.float()
            squares += float(wide @ wide)
    return math.sqrt(squares)


def gradient_square(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """The square of `gradient_norm`, on the gradients' device, without waiting for it; [], fp64."""
    if gradients[0].device.type != "cpu":
        return square_on_device(gradients)
    norm = gradient_norm(gradients)
    return torch.tensor(norm * norm, dtype=torch.float64)  # `norm**2` would raise OverflowError


def square_on_device(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """See `gradient_square`. A tensor's own norm is in fp32 at least; the squares of these norms are summed in fp64.

    In fp32 on a device that has no fp64."""
    wide = torch.promote_types(gradients[0].dtype, torch.float32)
    norms = torch._foreach_norm(list(gradients), 2, dtype=wide)
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms), dtype=wide_dtype(norms[0].device))
    return norm.square()
