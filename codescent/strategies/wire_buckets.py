"""In: buckets of gradients. Out: their sums over replicas in the format of parallel.wire, one after the other.
Does not fill buckets (ddp.py does) and does not encode (wire.py does)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from codescent.plan.wire import Wire, kept_name
from codescent.strategies.wire import Channel, WireSum


class CompressedBuckets:
    """The sums of a rank's buckets, in one thread and in the order of the buckets.

    Args:
        wire: how they travel.
        shapes: of the gradients in each bucket.
        group: the replicas. Nothing else uses it while sums are under way.
        device: of the gradients.
        dtype: of the buckets: fp32 or fp64.
        since: the first step (from 0) that is compressed.
    """

    def __init__(
        self,
        wire: Wire,
        shapes: Sequence[Sequence[tuple[int, ...]]],
        group: Any,
        device: torch.device,
        dtype: str,
        since: int,
    ) -> None:
        self.channel, self.since = Channel(device), since
        self.sums = [WireSum(wire, one, group, device, dtype, self.channel) for one in shapes]

    def start(self, number: int, gradients: Sequence[torch.Tensor]) -> Any:
        """Begin to sum the gradients of bucket `number`, in place. Returns a handle with `wait`."""
        return self.sums[number].start(gradients)

    def state(self) -> Mapping[str, torch.Tensor]:
        """What a resumed run needs, by the names of `kept_name`."""
        numbered = enumerate(self.sums)
        return {kept_name(number, name): value for number, one in numbered for name, value in one.state().items()}

    def buffers(self) -> list[torch.Tensor]:
        """The memory that it holds."""
        return [buffer for one in self.sums for buffer in one.buffers()]

    def close(self) -> None:
        """End the thread, and drop the process group."""
        self.channel.close()
        for one in self.sums:
            one.close()
