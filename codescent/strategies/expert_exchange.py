"""In: rows of tokens in the order of their experts, a process group whose ranks share the experts. Out: the rows of
this rank's experts; a function that sends their outputs back. Backward sends gradients the other way.
Does not choose experts and does not compute them (operators/ does)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from codescent.operators.routing import permuted
from codescent.strategies.collectives import all_to_all

# Shapes: P ranks, E experts of all ranks, e of one rank, R rows, D channels.


def exchange(
    rows_RD: Tensor, counts_E: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, list[int], Callable[[Tensor], Tensor]]:
    """See `operators.experts.Exchange`. The host waits for the numbers of rows: they are the sizes of messages."""
    ranks = group.size()
    received_E = torch.empty_like(counts_E)
    all_to_all(received_E, counts_E, group=group)
    both_2Pe = torch.stack([counts_E, received_E]).view(2, ranks, -1)
    sends, receives = both_2Pe.sum(2).tolist()
    order_R, inverse_R = _by_expert(both_2Pe[1], sum(receives))
    arrived_RD = _sent(rows_RD, receives, sends, group)

    def back(outputs_RD: Tensor) -> Tensor:
        return _sent(permuted(outputs_RD, inverse_R, order_R), sends, receives, group)

    return permuted(arrived_RD, order_R, inverse_R), both_2Pe[1].sum(0).tolist(), back


def _by_expert(counts_Pe: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """The indices that put rows which arrived rank by rank in the order of the experts, and their inverse."""
    flat = counts_Pe.flatten()
    starts_eP = (flat.cumsum(0) - flat).view_as(counts_Pe).t()
    sizes = counts_Pe.t().flatten()
    ends = sizes.cumsum(0)
    shift_R = (starts_eP.flatten() - (ends - sizes)).repeat_interleave(sizes, output_size=rows)
    places_R = torch.arange(rows, device=flat.device)
    order_R = places_R + shift_R
    inverse_R = torch.empty_like(order_R)
    inverse_R[order_R] = places_R
    return order_R, inverse_R


def _sent(rows_RD: Tensor, receives: list[int], sends: list[int], group: dist.ProcessGroup) -> Tensor:
    arrived_RD: Tensor = _AllToAll.apply(rows_RD, receives, sends, group)  # type: ignore[no-untyped-call]
    return arrived_RD


class _AllToAll(torch.autograd.Function):
    """Rows to other ranks: `sends` of them to each, one rank behind the other. Backward sends gradients back."""

    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, receives: list[int], sends: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.receives, ctx.sends, ctx.group = receives, sends, group
        return _exchanged(rows_RD, receives, sends, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_arrived_RD: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchanged(d_arrived_RD, ctx.sends, ctx.receives, ctx.group), None, None, None


def _exchanged(rows_RD: Tensor, receives: list[int], sends: list[int], group: dist.ProcessGroup) -> Tensor:
    arrived_RD = rows_RD.new_empty(sum(receives), rows_RD.shape[1])
    all_to_all(arrived_RD, rows_RD.contiguous(), receives, sends, group=group)
    return arrived_RD
