"""In: a tensor, a process group. Out: torch's collectives by one name each, whatever this version of torch calls them.
Does not decide what is sent. All of torch that strategies need under a private or a changing name stands here."""

from __future__ import annotations

from collections.abc import Callable, Container
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

# torch 2.13 has renamed the first two and warns of the old names.
all_gather_into: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_into: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
assert_async: Any = torch._assert_async


def at_end_of_backward(scheduled: Container[int], act: Callable[[int], None]) -> int:
    """Call `act` once, with its number, when the running backward pass has ended.

    Called by hooks on gradients. A backward pass inside another one (of torch.utils.checkpoint, say) is one by itself.
    `scheduled` has what it returned before: the numbers of backward passes, unique in the process.
    """
    number = int(torch._C._current_graph_task_id())
    if number not in scheduled:
        torch.autograd.Variable._execution_engine.queue_callback(partial(act, number))
    return number


def in_backward() -> bool:
    """Whether a backward pass is running in this thread."""
    return int(torch._C._current_graph_task_id()) >= 0
