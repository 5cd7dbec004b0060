"""In: a process group, a size. Out: seconds of our all-reduce and of the backend's, in turns; how the sums differ.
Does not print and does not judge a ratio."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from codescent.base.device import synchronize
from codescent.collectives.ring_all_reduce import exchange, ring_all_reduce
from codescent.collectives.task import Task

FP32_BYTES = 4
OURS, BACKEND = "ours", "backend"
ALL_REDUCES: Mapping[str, Callable[[Tensor], Any]] = {OURS: ring_all_reduce, BACKEND: dist.all_reduce}


def timed_bytes(size_bytes: int) -> int:
    """The size of the tensor that is timed: whole numbers of fp32, and at least one."""
    return max(1, size_bytes // FP32_BYTES) * FP32_BYTES


def measure(task: Task, device: torch.device) -> dict[str, Any]:
    """Time both all-reduces on fp32 numbers, in rounds whose order is reversed from round to round. Collective.

    The first round is a warm-up. A turn's time is that of the slowest rank.

    Returns:
        JSON data: "seconds", a list for each all-reduce; "same_bits", for each whether this rank has the bits of the
        rank before; "difference", the largest difference of the two sums relative to the largest sum, on this rank.
    """
    generator = torch.Generator().manual_seed(dist.get_rank())
    given = torch.randn(timed_bytes(task.size_bytes) // FP32_BYTES, generator=generator).to(device)
    sums = {name: torch.empty_like(given) for name in ALL_REDUCES}
    seconds: dict[str, list[float]] = {name: [] for name in ALL_REDUCES}
    names, spent_s = tuple(ALL_REDUCES), 0.0
    for number in range(task.rounds + 1):
        for name in names if number % 2 else reversed(names):
            turn_s = _turn(ALL_REDUCES[name], sums[name].copy_(given))
            spent_s += turn_s
            if number:
                seconds[name].append(turn_s)
        if number and spent_s > task.budget_s:  # a sum over ranks, so they all stop here
            break
    ours, backends = sums[OURS], sums[BACKEND]
    difference = (ours - backends).abs().max() / backends.abs().max()
    return {
        "seconds": seconds,
        "same_bits": {name: _as_before(result) for name, result in sums.items()},
        "difference": difference.item(),
    }


def _turn(all_reduce: Callable[[Tensor], Any], values: Tensor) -> float:
    """The seconds of one call on the slowest rank. Collective."""
    together = torch.zeros(1, device=values.device, dtype=torch.float64)
    dist.all_reduce(together)
    synchronize(values.device)
    begin_s = time.perf_counter()
    all_reduce(values)
    synchronize(values.device)
    together[0] = time.perf_counter() - begin_s
    dist.all_reduce(together, dist.ReduceOp.MAX)
    return together.item()


def _as_before(values: Tensor) -> bool:
    """Whether this rank has the same bits as the rank before it in the ring. Collective."""
    group = dist.group.WORLD
    assert group is not None
    other = torch.empty_like(values)
    for work in exchange(values, other, group):
        work.wait()
    return torch.equal(other.view(torch.int32), values.view(torch.int32))
