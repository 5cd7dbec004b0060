"""In: this rank among those of its node. Out: the seconds of copies in the memory of their host, all of them at once.
Does not copy to or from a device (memory.py does), and makes no bandwidth of it (host_rate.py does)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from codescent.base.device import offered
from codescent.measure.items import HOST_COPY, Item
from codescent.measure.timer import Timer

COPIED_BYTES = 256 << 20
"""More than a rank's share of the caches of a host: it says the bandwidth of its memory."""
FP32_BYTES = 4


def is_apart(device: torch.device) -> bool:
    """Whether the host of a device has another memory. Else it is the one in which memory.py copies."""
    return offered(device).own_memory


def copies(timer: Timer, share_s: float) -> Iterator[Item]:
    """Copy a tensor in the memory of the host, on every rank at the same time: the ranks of a node share it.

    Collective. Nothing where the device's memory is the host's.
    """
    if not is_apart(timer.device):
        return
    source, target = (torch.ones(COPIED_BYTES // FP32_BYTES) for _ in range(2))  # both are on the host
    seconds = timer.repeated(lambda: target.copy_(source), share_s)
    yield Item(HOST_COPY, "", (COPIED_BYTES,), 2.0 * COPIED_BYTES, seconds)  # it is read and written
