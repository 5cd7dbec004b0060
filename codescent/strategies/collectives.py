"""In: a tensor, a process group. Out: torch's collectives by one name each, whatever this version of torch calls them.
Does not decide what is sent. All of torch that strategies need under a private or a changing name stands here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

# torch 2.13 has renamed the first two and warns of the old names.
all_gather_into: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_into: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
assert_async: Any = torch._assert_async


def at_end_of_backward(scheduled: int | None, act: Callable[[], None]) -> int:
    """Have `act` called when the backward pass that is running has ended, once. Called by hooks on gradients.

    Args:
        scheduled: what it returned before; a pass that ended in an error has not called `act`, and does not count.

    Returns:
        The number of this backward pass.
    """
    number = int(torch._C._current_graph_task_id())
    if number != scheduled:
        torch.autograd.Variable._execution_engine.queue_callback(act)
    return number
