"""In: fully_shard's weights to all-gather, its gradients to reduce-scatter. Out: both collectives made asynchronous.
Does not decide what is sharded. Used without CUDA only: on CUDA, fully_shard overlaps its collectives by streams."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from codescent.strategies.collectives import start_all_gather, start_all_reduce, start_reduce_scatter
from codescent.strategies.own_sums import OwnSums


class AsyncAllGather:
    """fully_shard's all-gather, always asynchronous: fully_shard waits for its handle before it reads weights.

    `gathers`: where to note the memory for gathered weights. fully_shard copies them into the weights, and frees it.
    """

    def __init__(self, gathers: WeakSet[torch.Tensor]) -> None:
        self.gathers = gathers

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for the gathered weights."""
        memory = torch.empty(size, dtype=dtype, device=device)
        self.gathers.add(memory)
        return memory

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        """Start the all-gather."""
        return start_all_gather(output_tensor, input_tensor, group=group)


@dataclass
class UnitReduction:
    """Gradients of one unit, being reduce-scattered over the shards and then all-reduced over the replicas.

    Attributes:
        parameters: the unit's shards.
        shard: memory that fully_shard uses as the gradients of `parameters`.
        wire: result of the collectives, in the dtype in which gradients are sent; it may be `shard`.
        whole: input of the reduce-scatter. Its memory must live until it has been sent.
        reduce_scatter, all_reduce: handles of the collectives; None: the all-reduce has not started.
    """

    parameters: Sequence[nn.Parameter]
    shard: torch.Tensor
    wire: torch.Tensor
    whole: torch.Tensor
    reduce_scatter: Any
    all_reduce: Any = None


class GradientsInFlight:
    """The unfinished reductions of a chunk, in the same order on every rank, and the sums of the finished ones.

    `wire_dtype`: dtype in which gradients are sent. (fully_shard assumes that it is the dtype of the shards.)
    """

    def __init__(self, replicas: dist.ProcessGroup | None, wire_dtype: torch.dtype) -> None:
        self.replicas, self.wire_dtype = replicas, wire_dtype
        self.reductions: deque[UnitReduction] = deque()
        self.sums: dict[nn.Parameter, torch.Tensor] = {}
        self.gathers: WeakSet[torch.Tensor] = WeakSet()
        self.own = OwnSums()

    def advance(self) -> None:
        """Finish the reductions that are in their last collective. Start the all-reduce of the others."""
        while self.reductions and (self.replicas is None or self.reductions[0].all_reduce is not None):
            self._finish(self.reductions.popleft())
        if self.replicas is not None:
            for reduction in self.reductions:
                reduction.reduce_scatter.wait()
                reduction.all_reduce = start_all_reduce(reduction.wire, group=self.replicas)

    def finish(self) -> None:
        """Wait for every reduction."""
        while self.reductions:
            self.advance()

    def _finish(self, reduction: UnitReduction) -> None:
        """Add a finished reduction to `sums` and clear `.grad`: the next backward must not add to this buffer."""
        (reduction.all_reduce or reduction.reduce_scatter).wait()
        if reduction.shard is not reduction.wire:
            reduction.shard.copy_(reduction.wire)
        for parameter in reduction.parameters:
            if parameter.grad is not None:
                found = local_gradient(parameter)
                self.sums[parameter] = self.sums[parameter].add_(found) if parameter in self.sums else found
                parameter.grad = None

    def close(self) -> None:
        """Drop the reductions and the process group."""
        self.reductions.clear()
        self.replicas = None


class AsyncReduceScatter:
    """fully_shard's reduce-scatter of one unit, asynchronous: fully_shard continues before its output has values.

    `last`: this unit is the last in backward. Then its all-reduce starts at once, because no other backward can hide
    it. `parameters`: the unit's trained shards, `indices`: theirs; set after construction, once the shards have memory.
    """

    def __init__(self, in_flight: GradientsInFlight, *, last: bool) -> None:
        self.in_flight, self.last = in_flight, last
        self.parameters: list[nn.Parameter] = []
        self.indices: list[int] = []
        self.allocates_input = True

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocate memory. fully_shard calls this twice per reduction: first for the input, then for the output."""
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
        """Start the reduce-scatter, and the next collective of the units before this one."""
        same = output_tensor.dtype == input_tensor.dtype
        wire = output_tensor if same else torch.empty_like(output_tensor, dtype=input_tensor.dtype)
        self.in_flight.own.add(self.indices, [input_tensor])
        work = start_reduce_scatter(wire, input_tensor, group=group)
        self.in_flight.advance()
        self.in_flight.reductions.append(UnitReduction(self.parameters, output_tensor, wire, input_tensor, work))
        if self.last and self.in_flight.replicas is not None:
            self.in_flight.advance()


def local_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's shard of the gradient; zeros if the parameter did not contribute to the loss."""
    assert isinstance(parameter, DTensor)
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros_like(parameter.to_local())
    assert isinstance(gradient, DTensor)
    return gradient.to_local()
