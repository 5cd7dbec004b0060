"""In: rows in groups that follow each other, a matrix for each group. Out: their products, by one kernel where torch
has one, else group by group.
Does not differentiate: experts.py writes its backward pass with these functions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from codescent.base.device import offered
from codescent.operators import products

# Shapes: R rows of all groups, G groups, K inner dimension, M columns.


def each(counts: Sequence[int]) -> list[tuple[int, slice]]:
    """The number and the rows of each group that has some. `counts`: rows of each group."""
    ends = list(accumulate(counts))
    return [(group, slice(end - count, end)) for group, (count, end) in enumerate(zip(counts, ends)) if count]


def times(a_RK: Tensor, b_GKM: Tensor, counts: Sequence[int], out_RM: Tensor) -> Tensor:
    """The rows of each group times its matrix, into `out_RM`. The matrices may be a view with any strides."""
    if _by_one_kernel(a_RK):
        return out_RM.copy_(F.grouped_mm(a_RK, b_GKM, offs=_ends(counts, a_RK.device)))
    for group, rows in each(counts):
        products.mm(a_RK[rows], b_GKM[group], out=out_RM[rows])
    return out_RM


def add_times_(sum_RM: Tensor, a_RK: Tensor, b_GKM: Tensor, counts: Sequence[int]) -> Tensor:
    """Add the rows of each group times its matrix to `sum_RM`."""
    if _by_one_kernel(a_RK):
        return sum_RM.add_(F.grouped_mm(a_RK, b_GKM, offs=_ends(counts, a_RK.device)))
    for group, rows in each(counts):
        products.addmm_(sum_RM[rows], a_RK[rows], b_GKM[group])
    return sum_RM


def transposed_times(a_RK: Tensor, b_RM: Tensor, counts: Sequence[int], out_GKM: Tensor) -> Tensor:
    """a^T b of the rows of each group, into `out_GKM`, a view with any strides; 0 for a group without rows."""
    if _by_one_kernel(a_RK):
        return out_GKM.copy_(F.grouped_mm(a_RK.t(), b_RM, offs=_ends(counts, a_RK.device)))
    for group, rows in each(counts):
        products.mm(a_RK[rows].t(), b_RM[rows], out=out_GKM[group])
    for group, count in enumerate(counts):
        if not count:
            out_GKM[group] = 0.0
    return out_GKM


def _ends(counts: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(list(accumulate(counts)), dtype=torch.int32, device=device)


def _by_one_kernel(rows: Tensor) -> bool:
    """Whether torch multiplies all groups at once: in bf16 on CUDA, where the sizes suit the kernel."""
    if rows.dtype != torch.bfloat16 or not offered(rows.device).groups or not len(rows):
        return False
    return rows.shape[1] % _ALIGNED == 0 and works(rows.device.type)


_ALIGNED = 8
"""Rows begin at multiples of 16 bytes: 8 numbers in bf16."""


@cache
def works(device: str) -> bool:
    """Whether torch's kernel does on a device what the loop does, with matrices of such strides. Tried once."""
    counts = (3, 0, 5)
    rows = torch.arange(8 * 16, device=device).view(8, 16).remainder(7).to(torch.bfloat16)
    matrices = torch.arange(24 * 3 * 2 * 16, device=device).view(24, 3, 2, 16).remainder(5).to(torch.bfloat16)
    try:
        found = F.grouped_mm(rows, matrices[:, :, 0].permute(1, 2, 0), offs=_ends(counts, rows.device))
        squares = F.grouped_mm(found.t(), rows, offs=_ends(counts, rows.device))
    except (RuntimeError, AttributeError):  # an older device, or a torch without the kernel
        return False
    expected = [rows[at] @ matrices[:, group, 0].t() for group, at in each(counts)]
    same = torch.equal(found, torch.cat(expected)) and not squares[1].any()
    return same and torch.equal(squares[2], found[3:].t() @ rows[3:])
