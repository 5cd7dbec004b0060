"""In: a reduce-scatter, or an all-gather of two ranks, over gloo. Out: the same, of messages from each rank to each.
Does not choose them: collectives.py does. Compiled code has an all-to-all in place of messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# gloo's reduce-scatter is its all-reduce: for n ranks and a payload S each rank sends 2 (n - 1) / n S. An exchange of
# parts and a local sum send half of that (benchmarks/reduce_scatter.py).
#
# gloo's all-to-all, and its all-gather of two ranks, post a send before the receive from the same rank. So a rank may
# be told that it may send while the other one is still waiting for this word: it comes behind the data. Then a slow
# link carries one direction after the other. Here every receive is posted before the first send.

SUM_TAG, GATHER_TAG = 0x5C5, 0x5C6
"""No other messages of a group have these tags. Those of one tag arrive in the order in which they were sent."""


def over_gloo(tensor: Tensor, group: dist.ProcessGroup | None) -> bool:
    """Whether gloo sends what is in this memory. Compiled code is told by the device: gloo alone serves the CPU."""
    if tensor.device.type != "cpu":
        return False
    return torch.compiler.is_compiling() or dist.get_backend(group) == "gloo"


class _Messages(dist.Work):
    """Messages under way: one to each other rank of a group, and one from each.

    Args:
        sent: what each rank is to get, by its number; this rank's own part stays here. Not to be changed before the
            end.
        places: where what comes from each rank is to be; that of this rank is not written.
    """

    def __init__(self, sent: Sequence[Tensor], places: Sequence[Tensor], group: dist.ProcessGroup, tag: int) -> None:
        super().__init__()
        self.sent, self.places = sent, places  # their memory must live until the end
        rank, ranks = group.rank(), group.size()
        others = [(rank + hop) % ranks for hop in range(1, ranks) if sent[0].numel()]
        self.receives: dict[int, Any] = {
            peer: dist.irecv(places[peer], group=group, group_src=peer, tag=tag) for peer in others
        }
        self.sends: list[Any] = [dist.isend(sent[peer], group=group, group_dst=peer, tag=tag) for peer in others]

    def wait(self, *_: Any) -> bool:
        """Wait until all messages have come and gone. May be repeated."""
        for rank in range(len(self.places)):
            self.land(rank)
        for work in self.sends:
            work.wait()
        self.sent, self.places, self.sends = (), (), []
        return True

    def land(self, rank: int) -> Tensor:
        """Wait for the message of a rank, and return it."""
        if rank in self.receives:
            self.receives.pop(rank).wait()
        return self.places[rank]


class SumOfParts(_Messages):
    """A reduce-scatter under way: `output` has its values after `wait`.

    The parts are added in the order of the ranks, in fp32 at least, so the sum has the same bits each time.

    Args:
        output: this rank's part of the sum.
        summands: of this rank, the parts of all ranks in the order of the ranks. Not to be changed before the end.
    """

    def __init__(self, output: Tensor, summands: Tensor, group: dist.ProcessGroup) -> None:
        parts, own = list(summands.view(group.size(), -1)), group.rank()
        self.output, self.received = output.view(-1), [torch.empty_like(part) for part in parts[1:]]
        places = [*self.received[:own], parts[own], *self.received[own:]]
        super().__init__(parts, places, group, SUM_TAG)

    def wait(self, *timeout: Any) -> bool:
        """See _Messages."""
        if self.places:
            wide = torch.promote_types(self.output.dtype, torch.float32)
            total = self.output if wide == self.output.dtype else torch.empty_like(self.output, dtype=wide)
            total.copy_(self.land(0))
            for rank in range(1, len(self.places)):
                total.add_(self.land(rank))
            self.output.copy_(total)
        self.received = []
        return super().wait(*timeout)


def gather_of_two(gathered: Tensor, own: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start an all-gather of two ranks. `own`: this rank's part, which may be its place in `gathered`."""
    parts, own = list(gathered.view(2, -1)), own.reshape(-1)
    place = parts[group.rank()]
    if place.data_ptr() != own.data_ptr():
        place.copy_(own)
    return _Messages([own, own], parts, group, GATHER_TAG)


def compiled_sum_of_parts(output: Tensor, summands: Tensor, group: dist.ProcessGroup) -> None:
    """`SumOfParts` for torch.compile, which knows no messages: one all-to-all, then the same additions."""
    received = torch.empty_like(summands)
    dist.all_to_all_single(received, summands, group=group)
    wide = torch.promote_types(output.dtype, torch.float32)
    first, *others = received.view(group.size(), -1)
    total = first.to(wide)
    for term in others:
        total = total + term
    output.copy_(total.view(output.shape))
