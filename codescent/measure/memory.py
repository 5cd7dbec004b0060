"""In: a device. Out: the seconds of copies in its memory, and to and from its host; what an empty rank holds; how much
more an allocator holds than is in use.
Does not know what a model needs (cost/memory.py does)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from codescent.base.device import most_reserved, offered, total_memory, used_memory
from codescent.base.device_kinds import kernels_of
from codescent.measure.items import COPY, FROM_DEVICE, TO_DEVICE, Item
from codescent.measure.timer import Timer
from codescent.train.memory import memory_now_bytes

COPIED_BYTES: Mapping[str, tuple[int, ...]] = {
    "cpu": (256 << 10, 4 << 20, 64 << 20),
    "cuda": (4 << 20, 64 << 20, 1 << 30),
}
"""The largest is more than a cache holds: it says the bandwidth."""
BUS_BYTES = (64 << 10, 1 << 20, 16 << 20, 128 << 20)
FP32_BYTES = 4
DEPTHS = 8
BLOCK = ((1, True), (3, True), (1, True), (1, False), (1, True), (4, True), (4, True), (1, False))
"""Of the trial of the allocator: blocks, and the tensors that each makes in forward, as multiples of one of its rows,
with whether backward needs them. They are those of GPT-2: norm, queries with keys and values, attention, its product;
norm, activation and its slope, product."""
ROWS_BYTES: Mapping[str, int] = {"cpu": 2 << 20, "cuda": 32 << 20}
"""Of a tensor of rows."""


def copies(timer: Timer, share_s: float) -> Iterator[Item]:
    """Copy tensors in the memory of each rank's device at the same time. Collective."""
    sizes = COPIED_BYTES[timer.kernels]
    for size in sizes:
        source, target = (torch.ones(size // FP32_BYTES, device=timer.device) for _ in range(2))
        seconds = timer.repeated(lambda: target.copy_(source), share_s / len(sizes))  # noqa: B023 - called at once
        yield Item(COPY, "", (size,), 2.0 * size, seconds)  # it is read and written


def bus(timer: Timer, share_s: float) -> Iterator[Item]:
    """Copy tensors between the devices of all ranks and their host. Nothing where that is one memory."""
    if not offered(timer.device).own_memory:
        return
    for size in BUS_BYTES:
        on_host = torch.ones(size // FP32_BYTES, pin_memory=True)
        on_device = torch.ones(size // FP32_BYTES, device=timer.device)
        for kind, source, target in ((TO_DEVICE, on_host, on_device), (FROM_DEVICE, on_device, on_host)):
            seconds = timer.repeated(
                lambda source=source, target=target: target.copy_(source, non_blocking=True),  # type: ignore[misc]
                share_s / (2 * len(BUS_BYTES)),
            )
            yield Item(kind, "", (size,), float(size), seconds)


def held_bytes(device: torch.device) -> int:
    """What this rank holds before it has a tensor. On a GPU all that is in use on the device: it is this rank's own."""
    return used_memory(device) if offered(device).own_memory else memory_now_bytes(device)


def total_bytes(device: torch.device, host_bytes: int, local_ranks: int) -> int:
    """Of the memory of a rank's device. The ranks of a machine share that of its host."""
    return total_memory(device) if offered(device).own_memory else host_bytes // local_ranks


def fragments(device: torch.device) -> float:
    """By which share the allocator holds more than is in use at most, while tensors are made and let go of as in steps.

    The first call of the process counts: later the allocator has room that others have left.
    """
    empty_bytes = memory_now_bytes(device)
    step = _TrialStep(device, ROWS_BYTES[kernels_of(device.type)] // FP32_BYTES)
    for _ in range(2):
        step.take()
    held = most_reserved(device) if offered(device).own_memory else step.held_bytes - empty_bytes
    return max(0.0, held / step.most_bytes - 1.0)


class _TrialStep:
    """Allocates as a step does, and writes to all of it. `rows`: numbers of a tensor of rows.

    Attributes:
        most_bytes: that were in use at a time.
        held_bytes: what the process held at such a moment.
    """

    def __init__(self, device: torch.device, rows: int) -> None:
        self.device, self.rows = device, rows
        self.in_use_bytes = self.most_bytes = self.held_bytes = 0

    def take(self) -> None:
        """Forward through all blocks, and backward."""
        kept = list[Tensor]()
        for _ in range(DEPTHS):
            for times, is_kept in BLOCK:
                made = self._made(times * self.rows)
                if is_kept:
                    kept.append(made)
                else:
                    self._dropped(made)
                del made
        gradient = self._made(self.rows)
        while kept:
            self._dropped(gradient)
            gradient = self._made(len(kept[-1]))
            self._dropped(kept.pop())
        self._dropped(gradient)

    def _made(self, numbers: int) -> Tensor:
        made = torch.ones(numbers, device=self.device)
        self.in_use_bytes += numbers * FP32_BYTES
        if self.in_use_bytes >= self.most_bytes:
            self.most_bytes, self.held_bytes = self.in_use_bytes, memory_now_bytes(self.device)
        return made

    def _dropped(self, tensor: Tensor) -> None:
        self.in_use_bytes -= len(tensor) * FP32_BYTES
