"""In: ranks that compute the same and meet, again and again. Out: the seconds of a rank in the mean, of the slowest
one, and with the collective at which they meet.
Does not make constants of it (constants.py does)."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

from codescent.measure.items import MEAN, MET, SLOWEST, WAITING, WITHOUT_WORK, Item
from codescent.measure.spread import Spread
from codescent.measure.timer import Timer
from codescent.strategies import collectives

SIDE = {"cpu": 256, "cuda": 2048}
"""Rows and columns of the products that ranks compute."""
PAYLOAD_BYTES = 64 << 10
WORK_S = 0.01
"""Between two collectives of tensor parallelism a rank computes about so long."""
WINDOWS, LEAST, MOST = 8, 4, 2000
"""Parts of the repeats whose means are told apart, and the repeats of one part: a mean has the rare long waits."""
TRIED = 4


def measure(timer: Timer, share_s: float) -> Iterator[Item]:
    """Compute and meet for about `share_s` seconds, with all ranks. Collective.

    The work of all ranks is equally large. So what the slowest one takes more is the machine: other programs, clocks,
    caches. What a meeting takes beside that is waking up and messages.
    """
    side, group = SIDE[timer.kernels], dist.group.WORLD
    assert group is not None
    left, right = (torch.ones(side, side, device=timer.device) for _ in range(2))
    result, values = torch.empty_like(left), torch.zeros(PAYLOAD_BYTES // 4, device=timer.device)

    def compute(times: int) -> None:
        for _ in range(times):
            torch.mm(left, right, out=result)

    compute(TRIED)
    one_s = timer.together(timer.once(lambda: compute(TRIED)) / TRIED)
    times = max(1, round(WORK_S / one_s))
    alone = timer.of_slowest(lambda: collectives.all_reduce(values, group=group), share_s / 8, group)
    repeats = WINDOWS * min(MOST, max(LEAST, int(share_s / WINDOWS / (times * one_s + alone.median))))
    own = torch.zeros(repeats, dtype=torch.float64)
    whole = torch.zeros(repeats, dtype=torch.float64)
    timer.together()
    for number in range(repeats):
        begin_s = time.perf_counter()
        own[number] = timer.once(lambda: compute(times))
        collectives.all_reduce(values, group=group)
        timer.synchronize()
        whole[number] = time.perf_counter() - begin_s
    mean, slowest = own.clone(), own
    dist.all_reduce(mean)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    dist.all_reduce(whole, dist.ReduceOp.MAX)
    sizes = (side, times)
    for name, found in ((MEAN, mean / dist.get_world_size()), (SLOWEST, slowest), (MET, whole)):
        yield Item(WAITING, name, sizes, 1.0, Spread.of(found.view(WINDOWS, -1).mean(1).tolist()))
    yield Item(WAITING, WITHOUT_WORK, (PAYLOAD_BYTES,), 1.0, alone)
