"""In: a call of this rank. Out: the seconds of its repeats, while all other ranks repeat theirs.
Does not know what is called. A collective is repeated as often on every rank; other calls for as long."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from codescent.base.device import current_stream, offered, synchronize
from codescent.base.device_kinds import kernels_of
from codescent.measure.spread import Spread

LEAST, MOST = 5, 200
"""Repeats of a call."""
TOO_LONG = 3.0
"""A call that would take this many times its share of the time, with LEAST repeats, is left out."""
WARM_UPS = 2


@dataclass(frozen=True)
class Timer:
    """Takes the time of calls on the device of this rank. All its methods but `once` are collective."""

    device: torch.device

    @property
    def kernels(self) -> str:
        """The row of the tables of sizes: "cpu", or "cuda" for all GPUs."""
        return kernels_of(self.device.type)

    def together(self, number: float = 0.0) -> float:
        """Wait for all ranks. Returns the largest number that any of them gave."""
        self.synchronize()
        largest = torch.tensor([number], dtype=torch.float64)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return float(largest)

    def synchronize(self) -> None:
        """Wait until the device has done what was launched."""
        synchronize(self.device)

    def once(self, call: Callable[[], object]) -> float:
        """The seconds of one call, to its end on the device."""
        self.synchronize()
        begin_s = time.perf_counter()
        call()
        self.synchronize()
        return time.perf_counter() - begin_s

    def once_on_stream(self, call: Callable[[], object]) -> float:
        """As `once`, without waiting for what other streams of the device do."""
        begin_s = time.perf_counter()
        call()
        if offered(self.device).streams:
            current_stream(self.device).synchronize()
        else:
            synchronize(self.device)
        return time.perf_counter() - begin_s

    def repeated(self, call: Callable[[], object], share_s: float) -> Spread:
        """Repeat a call that waits for no other rank, for about `share_s` seconds, while every rank does so."""
        for _ in range(WARM_UPS):
            call()
        self.together()
        found, end_s = list[float](), time.perf_counter() + share_s
        while len(found) < LEAST or (len(found) < MOST and time.perf_counter() < end_s):
            found.append(self.once(call))
        return Spread.of(found)

    def of_slowest(self, call: Callable[[], object], share_s: float, group: dist.ProcessGroup) -> Spread:
        """Repeat a collective of a group, as often on all ranks of all groups, for about `share_s` seconds. A repeat
        begins when all ranks of the group are there; its time is that of the slowest one."""
        call()  # a backend connects ranks with the first message
        longest_s = self.together(self.once(call))
        found = torch.zeros(min(MOST, max(LEAST, int(share_s / longest_s))), dtype=torch.float64)
        for number in range(len(found)):
            self._meet(group)
            found[number] = self.once(call)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
        return Spread.of(found.tolist())

    def _meet(self, group: dist.ProcessGroup) -> None:
        here = torch.zeros(1, device=self.device)
        dist.all_reduce(here, group=group)
        self.synchronize()
