"""In: shards to gather, gradients to scatter, from torch's fully_shard. Out: both in flight during computation.
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
    """Gradients of one unit in flight: reduce-scattered over the shards, then all-reduced over the replicas.

    `shard` is what fully_shard takes for the gradients of the unit's `parameters`; `wire` is the same in the dtype in
    which it is sent. `whole`, what is scattered, is kept until it has left. `scattering` and `adding` (None until the
    all-reduce has begun) are waited for.
    """

    parameters: Sequence[nn.Parameter]
    shard: torch.Tensor
    wire: torch.Tensor
    whole: torch.Tensor
    scattering: Any
    adding: Any = None


class GradientsInFlight:
    """The reductions under way of a chunk, in one order on every rank, and the sums of those that are done.

    `wire_dtype` is that in which gradients are sent; fully_shard believes that it is that of the shards.
    """

    def __init__(self, replicas: dist.ProcessGroup | None, wire_dtype: torch.dtype) -> None:
        self.replicas, self.wire_dtype = replicas, wire_dtype
        self.reductions: deque[Reduction] = deque()
        self.sums: dict[nn.Parameter, torch.Tensor] = {}

    def advance(self) -> None:
        """Finish the reductions that are in their last collective; begin the all-reduce of the others."""
        while self.reductions and (self.replicas is None or self.reductions[0].adding is not None):
            self._finish(self.reductions.popleft())
        if self.replicas is not None:
            for reduction in self.reductions:
                reduction.scattering.wait()
                reduction.adding = dist.all_reduce(reduction.wire, group=self.replicas, async_op=True)

    def finish(self) -> None:
        """Wait for every reduction."""
        while self.reductions:
            self.advance()

    def _finish(self, reduction: Reduction) -> None:
        """Move finished shards from `.grad` into `sums`: the next backward would add to a buffer still in flight."""
        (reduction.adding or reduction.scattering).wait()
        if reduction.shard is not reduction.wire:
            reduction.shard.copy_(reduction.wire)
        for parameter in reduction.parameters:
            if parameter.grad is not None:
                found = local_gradient(parameter)
                self.sums[parameter] = self.sums[parameter].add_(found) if parameter in self.sums else found
                parameter.grad = None

    def close(self) -> None:
        """Let go of the process group."""
        self.reductions.clear()
        self.replicas = None


class ReduceBehind:
    """fully_shard's asynchronous reduce-scatter of one unit: fully_shard goes on with views of memory filled later.

    The all-reduce of the unit to which backward comes `last` begins at once: no other unit's backward could hide it.
    `parameters` are the unit's shards, once they have memory.
    """

    def __init__(self, in_flight: GradientsInFlight, *, last: bool) -> None:
        self.in_flight, self.last = in_flight, last
        self.parameters: list[nn.Parameter] = []
        self.allocates_input = True

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for what is scattered, then for what arrives: fully_shard asks for the two in turn."""
        dtype = self.in_flight.wire_dtype if self.allocates_input else dtype
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
        """Begin to scatter; the units before it go on to their next collective."""
        same = output_tensor.dtype == input_tensor.dtype
        wire = output_tensor if same else torch.empty_like(output_tensor, dtype=input_tensor.dtype)
        work = reduce_scatter_into(wire, input_tensor, op=dist.ReduceOp.SUM, group=group, async_op=True)
        self.in_flight.advance()
        self.in_flight.reductions.append(Reduction(self.parameters, output_tensor, wire, input_tensor, work))
        if self.last and self.in_flight.replicas is not None:
            self.in_flight.advance()


def local_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of the gradient; zeros where the parameter took no part in the loss."""
    assert isinstance(parameter, DTensor)
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros_like(parameter.to_local())
    assert isinstance(gradient, DTensor)
    return gradient.to_local()
