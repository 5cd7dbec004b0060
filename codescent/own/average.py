"""In: parameters that every rank holds whole. Out: their gradients, averaged over the ranks while backward runs.
Does not choose the parameters and does not send anything itself: `strategies/buckets.py` does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from codescent.strategies.buckets import TORCH_DTYPE, BucketedGradients
from codescent.strategies.collectives import at_end_of_backward
from codescent.strategies.replicate import buckets

DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPE.items()}


class AveragedGradients:
    """When `backward` returns, the gradients of these parameters are means over the ranks.

    Args:
        parameters: trainable ones, of any of the dtypes in DTYPE_NAMES, in the module's order.
        bucket_bytes: they travel in buckets of about this size.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], bucket_bytes: int) -> None:
        kinds = dict.fromkeys(parameter.dtype for parameter in parameters)
        self.parts = [
            # A group matches collectives by their order, which autograd may choose otherwise on another rank: buckets
            # of one dtype leave in one order, so each dtype has a group of its own.
            _OneDtype([p for p in parameters if p.dtype == kind], bucket_bytes, dist.new_group() if number else None)
            for number, kind in enumerate(kinds)
        ]

    def accumulate(self, on: bool) -> None:
        """Whether the backward passes from here on only add, each rank for itself."""
        for part in self.parts:
            part.gradients.before_backward(last=not on)

    def close(self) -> None:
        """Let go of the parameters and process groups."""
        for part in self.parts:
            part.close()


class _OneDtype:
    """The gradients of parameters of one dtype.

    Beside them travels a mark for each parameter: how many ranks have a gradient of it. One that no rank has stays
    None, as in one process (an optimizer leaves it alone, where it would decay a weight whose gradient is zero). Only a
    rank that lacks a gradient reads the marks, so a device is not waited for where all are used.
    """

    def __init__(self, parameters: list[nn.Parameter], bucket_bytes: int, group: dist.ProcessGroup | None) -> None:
        self.parameters = parameters
        group = group or dist.group.WORLD
        assert group is not None
        self.world_size = group.size()
        name = DTYPE_NAMES[parameters[0].dtype]
        self.used: set[int] = set()
        self.backward: int | None = None
        self.hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook(index))  # type: ignore[no-untyped-call]
            for index, parameter in enumerate(parameters)
        ]
        self.marks = nn.Parameter(torch.zeros(len(parameters), dtype=parameters[0].dtype, device=parameters[0].device))
        filled = buckets([parameter.numel() for parameter in parameters], bucket_bytes, name)
        travelling = [*parameters, self.marks]
        self.gradients = BucketedGradients(travelling, [*filled, [len(parameters)]], name, name, group)
        self.gradients.before_backward(last=True)

    def _hook(self, index: int) -> Any:
        def arrived(_parameter: torch.Tensor) -> None:
            number = at_end_of_backward(self.backward, self._finish)
            if self.backward not in (None, number):  # the pass before has ended in an error, halfway
                self.gradients.release()
                self.used.clear()
            self.backward = number
            self.used.add(index)

        return arrived

    def _finish(self) -> None:
        """The end of a backward pass: wait for what is under way, and put the means where optimizers look."""
        used, self.used, self.backward = self.used, set(), None
        if not self.gradients.last:
            return
        # What an earlier backward pass has left counts, too: it is in the bucket's sum.
        mine = [index in used or parameter.grad is not None for index, parameter in enumerate(self.parameters)]
        self.marks.grad = torch.tensor(mine, dtype=self.marks.dtype, device=self.marks.device)
        self.gradients.reduce()
        if self.world_size > 1:
            torch._foreach_div_(self.gradients.buffers, float(self.world_size))
        *means, marks = self.gradients.collect()
        anyone = mine if all(mine) else [mark > 0 for mark in marks.tolist()]
        for parameter, mean, somebody in zip(self.parameters, means, anyone, strict=True):
            parameter.grad = mean if somebody else None
        self.marks.grad = None
        self.gradients.release()

    def close(self) -> None:
        """See AveragedGradients."""
        for hook in self.hooks:
            hook.remove()
        self.gradients.close()
