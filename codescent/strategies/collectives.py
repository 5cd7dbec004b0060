"""In: a tensor and a process group. Out: torch's collectives. In: a function. Out: its call at the end of backward.
A collective that blocks counts as waiting (base/stopwatch.py), except in code that torch.compile compiles.
Does not decide what is sent. Strategies use names that are private in torch, or differ between versions, only here."""

from __future__ import annotations

from collections.abc import Callable, Container
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from codescent.base.stopwatch import waiting

# torch 2.13 renamed the first two and warns if the old names are used.
start_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
start_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
assert_async: Any = torch._assert_async


def _waited(function: Callable[..., Any]) -> Callable[..., None]:
    """A function that returns when its collective is done. Its time counts as waiting."""

    def wait_for(*arguments: Any, **options: Any) -> None:
        if torch.compiler.is_compiling():
            function(*arguments, **options)
            return
        with waiting():
            function(*arguments, **options)

    return wait_for


all_gather_into = _waited(start_all_gather)
reduce_scatter_into = _waited(start_reduce_scatter)
all_reduce = _waited(dist.all_reduce)
all_to_all = _waited(dist.all_to_all_single)


class Awaited(dist.Work):
    """The handle of a collective. To wait for it counts as waiting."""

    def __init__(self, work: Any) -> None:
        super().__init__()
        self.work = work

    def wait(self, *timeout: Any) -> bool:
        """Wait until the collective is done."""
        with waiting():
            return bool(self.work.wait(*timeout))


FULLY_SHARD_WAITS = ("wait_for_unshard", "post_backward", "finalize_backward")
"""Methods of a unit of fully_shard in which the computation waits for collectives on fully_shard's CUDA streams. They
also copy into and out of the memory of its messages."""


def count_fully_shard_waits(unit: FSDPModule) -> None:
    """Count what a unit of fully_shard waits for on CUDA as waiting. torch has no public hook around these waits."""
    state: Any = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.11 has one group at most
    for group in [state._fsdp_param_group] if groups is None else groups:
        if group is not None:  # None: a unit without parameters
            for name in FULLY_SHARD_WAITS:
                setattr(group, name, _waited(getattr(group, name)))


def at_end_of_backward(scheduled: Container[int], act: Callable[[int], None]) -> int:
    """Schedule `act(number)` for the end of the running backward pass, and return the number of this pass.

    Hooks on gradients call this function. `scheduled`: numbers that it returned before; for these it does nothing. A
    number is unique in the process. A backward pass inside another one (as in torch.utils.checkpoint) has its own
    number.
    """
    number = int(torch._C._current_graph_task_id())
    if number not in scheduled:
        torch.autograd.Variable._execution_engine.queue_callback(partial(act, number))
    return number


def in_backward() -> bool:
    """Whether a backward pass is running in this thread."""
    return int(torch._C._current_graph_task_id()) >= 0
