"""In: a device. Out: the seconds of copies in its memory, and to and from its host; what an empty rank holds; how much
more an allocator holds than is in use.
Does not know what a model needs (cost/memory.py does)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

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
DEPTHS, KEPT_SHARE = 12, 0.5
"""Of the trial of the allocator: blocks, and the share of what a block makes that backward needs."""
BLOCK_BYTES: Mapping[str, int] = {"cpu": 8 << 20, "cuda": 64 << 20}


def copies(timer: Timer, share_s: float) -> Iterator[Item]:
    """Copy tensors in the memory of each rank's device at the same time. Collective."""
    sizes = COPIED_BYTES[timer.device.type]
    for size in sizes:
        source, target = (torch.ones(size // FP32_BYTES, device=timer.device) for _ in range(2))
        seconds = timer.repeated(lambda: target.copy_(source), share_s / len(sizes))  # noqa: B023 - called at once
        yield Item(COPY, "", (size,), 2.0 * size, seconds)  # it is read and written


def bus(timer: Timer, share_s: float) -> Iterator[Item]:
    """Copy tensors between the devices of all ranks and their host. Nothing on a CPU, whose memory is the host's."""
    if timer.device.type != "cuda":
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
    """What this rank holds before it has a tensor. On CUDA all that is in use on the device: it is this rank's own."""
    if device.type != "cuda":
        return memory_now_bytes(device)
    free, total = torch.cuda.mem_get_info(device)
    return int(total - free)


def total_bytes(device: torch.device, host_bytes: int, local_ranks: int) -> int:
    """Of the memory of a rank's device. The ranks of a machine share that of its host."""
    if device.type != "cuda":
        return host_bytes // local_ranks
    return int(torch.cuda.get_device_properties(device).total_memory)


def fragments(device: torch.device) -> float:
    """By which share the allocator holds more than is in use at most, in the order of steps: forward keeps half of what
    each block makes, and backward lets go of it from the last block to the first.

    The first call of the process counts: later the allocator has room that others have left.
    """
    empty_bytes = memory_now_bytes(device)
    step = _TrialStep(device, BLOCK_BYTES[device.type])
    for _ in range(2):
        step.take()
    held = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else step.held_bytes - empty_bytes
    return max(0.0, held / step.most_bytes - 1.0)


class _TrialStep:
    """Allocates as a step does, and writes to all of it.

    Attributes:
        most_bytes: that were in use at a time.
        held_bytes: what the process held at such a moment.
    """

    def __init__(self, device: torch.device, block_bytes: int) -> None:
        self.device, self.block_bytes = device, block_bytes
        self.in_use_bytes = self.most_bytes = self.held_bytes = 0

    def take(self) -> None:
        """Forward through all blocks, and backward."""
        kept = []
        for depth in range(DEPTHS):
            size = int(self.block_bytes * (1.0 + 0.3 * (depth % 3)))  # not all alike: what is free fits not always
            temporary = self._made(int((1.0 - KEPT_SHARE) * size))
            kept.append(self._made(int(KEPT_SHARE * size)))
            self._dropped(temporary)
            del temporary
        while kept:
            gradient = self._made(len(kept[-1]) * FP32_BYTES)
            self._dropped(gradient)
            self._dropped(kept.pop())
            del gradient

    def _made(self, size_bytes: int) -> Tensor:
        made = torch.ones(size_bytes // FP32_BYTES, device=self.device)
        self.in_use_bytes += len(made) * FP32_BYTES
        if self.in_use_bytes >= self.most_bytes:
            self.most_bytes, self.held_bytes = self.in_use_bytes, memory_now_bytes(self.device)
        return made

    def _dropped(self, tensor: Tensor) -> None:
        self.in_use_bytes -= len(tensor) * FP32_BYTES
