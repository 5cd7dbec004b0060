"""In: shards to gather, gradients to scatter, from torch's fully_shard. Out: both on their way while others compute.
Does not decide what is divided. For devices without streams: on CUDA fully_shard has streams for the same."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from codescent.strategies.collectives import all_gather_into, reduce_scatter_into


class GatherAhead:
    """fully_shard's all-gather, always asynchronous: it waits for what this returns before it reads the weights."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for the gathered weights."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        """Begin to gather."""
        return all_gather_into(output_tensor, input_tensor, group=group, async_op=True)


@dataclass
class Reduction:
    """Gradients of one unit on their way: scattered over the shards, then added over the copies, then taken home."""

    parameters: Sequence[nn.Parameter]
    home: torch.Tensor
    wire: torch.Tensor
    kept: torch.Tensor
    scattering: Any
    adding: Any = None


class Road:
    """What is under way of a chunk's gradients, in one order on every rank, and the sums of what has arrived.

    Args:
        copies: ranks with the same shards, over which these are added; None: there are none.
        wire_dtype: in which gradients are sent; fully_shard believes that it is that of the shards.
    """

    def __init__(self, copies: dist.ProcessGroup | None, wire_dtype: torch.dtype) -> None:
        self.copies, self.wire_dtype = copies, wire_dtype
        self.under_way: deque[Reduction] = deque()
        self.sums: dict[nn.Parameter, torch.Tensor] = {}

    def advance(self) -> None:
        """Take home what was on its last leg; what has been scattered begins to be added over the copies."""
        while self.under_way and (self.copies is None or self.under_way[0].adding is not None):
            self._take_home(self.under_way.popleft())
        if self.copies is not None:
            for reduction in self.under_way:
                reduction.scattering.wait()
                reduction.adding = dist.all_reduce(reduction.wire, group=self.copies, async_op=True)

    def finish(self) -> None:
        """Wait for everything that is under way."""
        while self.under_way:
            self.advance()

    def _take_home(self, reduction: Reduction) -> None:
        """Its gradients, out of reach of the next backward pass, which would add to them before they are there."""
        (reduction.adding or reduction.scattering).wait()
        if reduction.home is not reduction.wire:
            reduction.home.copy_(reduction.wire)
        for parameter in reduction.parameters:
            if parameter.grad is not None:
                found = local_gradient(parameter)
                self.sums[parameter] = self.sums[parameter].add_(found) if parameter in self.sums else found
                parameter.grad = None

    def close(self) -> None:
        """Let go of the process group."""
        self.under_way.clear()
        self.copies = None


class ReduceBehind:
    """fully_shard's reduce-scatter of one unit, asynchronous: fully_shard goes on with views of memory that the road
    fills later.

    Args:
        road: where the gradients go.
        last: whether backward comes to this unit last: no other one follows in whose time it could be added over the
            copies, so that begins at once.

    Attributes:
        parameters: the unit's shards, once they have memory.
    """

    def __init__(self, road: Road, *, last: bool) -> None:
        self.road, self.last = road, last
        self.parameters: list[nn.Parameter] = []
        self.allocates_input = True

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for what is scattered, then for what arrives: fully_shard asks for the two in turn."""
        dtype = self.road.wire_dtype if self.allocates_input else dtype
        self.allocates_input = not self.allocates_input
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Begin to scatter; the units before it are a leg further."""
        same = output_tensor.dtype == input_tensor.dtype
        wire = output_tensor if same else torch.empty_like(output_tensor, dtype=input_tensor.dtype)
        work = reduce_scatter_into(wire, input_tensor, op=dist.ReduceOp.SUM, group=group, async_op=True)
        self.road.advance()
        self.road.under_way.append(Reduction(self.parameters, output_tensor, wire, input_tensor, work))
        if self.last and self.road.copies is not None:
            self.road.advance()


def local_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of the gradient; zeros where the parameter took no part in the loss."""
    assert isinstance(parameter, DTensor)
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros_like(parameter.to_local())
    assert isinstance(gradient, DTensor)
    return gradient.to_local()
