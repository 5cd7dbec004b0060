"""In: shards to gather, gradients to scatter, from torch's fully_shard. Out: both on their way while others compute.
Does not decide what is divided. For devices without streams: on CUDA fully_shard has streams for the same."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

# torch 2.13 has renamed them
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class GatherAhead:
    """fully_shard's all-gather, always asynchronous: it waits for what this returns before it reads the weights."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for the gathered weights."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        """Begin to gather."""
        return _all_gather(output_tensor, input_tensor, group=group, async_op=True)


@dataclass
class Reduction:
    """Gradients of one unit on their way: scattered over the shards, then added over the copies, then copied home."""

    home: torch.Tensor
    wire: torch.Tensor
    kept: torch.Tensor
    scattering: Any
    adding: Any = None


class ReduceBehind:
    """fully_shard's reduce-scatter, asynchronous: it goes on with views of memory that `finish` fills.

    That is right as long as nobody reads them before, so they must not be added to older ones: whoever uses this takes
    the gradients of each backward pass away after `finish`. Reductions leave in one order on every rank.

    Args:
        copies: ranks with the same shards, over which these are then added; None: there are none.
        wire_dtype: in which gradients are sent; fully_shard believes that it is that of the shards.
    """

    def __init__(self, copies: dist.ProcessGroup | None, wire_dtype: torch.dtype) -> None:
        self.copies, self.wire_dtype = copies, wire_dtype
        self.under_way: deque[Reduction] = deque()
        self.allocates_input = True

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for what is scattered, then for what arrives: fully_shard asks for the two in turn."""
        dtype = self.wire_dtype if self.allocates_input else dtype
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
        """Begin to scatter; what has been scattered meanwhile begins to be added over the copies."""
        same = output_tensor.dtype == input_tensor.dtype
        wire = output_tensor if same else torch.empty_like(output_tensor, dtype=input_tensor.dtype)
        work = _reduce_scatter(wire, input_tensor, op=dist.ReduceOp.SUM, group=group, async_op=True)
        for earlier in self.under_way:
            if not self._add(earlier, wait=False):
                break
        self.under_way.append(Reduction(output_tensor, wire, input_tensor, work))

    def finish(self) -> None:
        """Wait for everything that is under way."""
        for reduction in self.under_way:
            self._add(reduction, wait=True)
        while self.under_way:
            reduction = self.under_way.popleft()
            if reduction.adding is not None:
                reduction.adding.wait()
            if reduction.home is not reduction.wire:
                reduction.home.copy_(reduction.wire)

    def _add(self, reduction: Reduction, *, wait: bool) -> bool:
        """Begin to add a reduction over the copies, if it has been scattered; whether it has been."""
        if self.copies is None or reduction.adding is not None:
            if wait and reduction.adding is None:
                reduction.scattering.wait()
            return True
        if not wait and not reduction.scattering.is_completed():
            return False
        reduction.scattering.wait()
        reduction.adding = dist.all_reduce(reduction.wire, group=self.copies, async_op=True)
        return True

    def close(self) -> None:
        """Let go of the process group."""
        self.under_way.clear()
        self.copies = None
