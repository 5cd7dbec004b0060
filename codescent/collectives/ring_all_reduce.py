"""In: a tensor on every rank of a group. Out: its sum over the ranks, in place, out of sends and receives alone.
Does not overlap with anything: it returns when it is done. Training uses the backend's own all-reduce."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

REDUCE_SCATTER, ALL_GATHER = "reduce-scatter", "all-gather"


@dataclass(frozen=True)
class RingStep:
    """What one rank did in one step of the ring.

    Attributes:
        phase: REDUCE_SCATTER or ALL_GATHER.
        step: within the phase, from 1 to ranks - 1.
        sent: index of the chunk that went to the rank `to`.
        received: index of the chunk that came from the rank `came_from`.
    """

    phase: str
    step: int
    sent: int
    to: int
    received: int
    came_from: int


def ring_all_reduce(
    values: Tensor, group: dist.ProcessGroup | None = None, after: Callable[[RingStep], None] | None = None
) -> None:
    """Sum `values` over the ranks of a group, in place. Collective.

    The ring algorithm of Patarasu and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations"
    (Journal of Parallel and Distributed Computing 69, 2009, section 3). `values` are cut into as many chunks as there
    are ranks. In each of n - 1 steps of a reduce-scatter a rank sends one chunk to the next rank and adds the chunk
    that it receives. Then it has the whole sum of one chunk. In n - 1 steps of an all-gather the sums go around.

    A rank sends 2 (n - 1) / n times the bytes of `values`: no all-reduce sends less. Each chunk is summed once, and
    then copied, so all ranks get the same bits. The order of a sum begins at another rank for each chunk, so a backend
    with another order may round differently.

    Args:
        values: [...], contiguous, of the same shape and dtype on every rank.
        group: default: all ranks.
        after: called after each step, when this rank has added or stored what it received.

    Raises:
        ValueError: `values` are not contiguous, so they cannot be cut without a copy.
    """
    if not values.is_contiguous():
        raise ValueError("values are not contiguous")
    group = group or dist.group.WORLD
    assert group is not None
    rank, ranks = group.rank(), group.size()
    following, preceding = (rank + 1) % ranks, (rank - 1) % ranks
    chunks = values.view(-1).tensor_split(ranks)
    room = torch.empty_like(chunks[0])  # the first chunk is the largest
    sending: list[dist.Work] = []
    for phase in (REDUCE_SCATTER, ALL_GATHER):
        first = rank if phase == REDUCE_SCATTER else following  # the chunk that this rank has whole
        for step in range(ranks - 1):
            sent, received = (first - step) % ranks, (first - step - 1) % ranks
            adds = phase == REDUCE_SCATTER
            target = room[: chunks[received].numel()] if adds else chunks[received]
            *sends, receive = exchange(chunks[sent], target, group)
            receive.wait()
            sending += sends  # a sum that replaces a chunk has come from it, so that chunk has left by then
            if adds:
                chunks[received].add_(target)
            if after is not None:
                after(RingStep(phase, step + 1, sent, following, received, preceding))
    for work in sending:
        work.wait()


def exchange(sent: Tensor, received: Tensor, group: dist.ProcessGroup) -> list[dist.Work]:
    """Begin to send `sent` to the next rank of the ring, and to fill `received` from the one before. Collective.

    Returns the handles. Wait for all of them; the last one is that of `received`.
    """
    rank, ranks = group.rank(), group.size()
    # In one batch: NCCL would wait for ever if every rank first sent, or first received.
    works: list[dist.Work] = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, sent, group=group, group_peer=(rank + 1) % ranks),
            dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % ranks),
        ]
    )
    return works
