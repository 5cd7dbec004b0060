"""In: a tensor and a process group. Out: torch's collectives. In: a function. Out: its call at the end of backward.
Does not decide what is sent. Strategies use names that are private in torch, or differ between versions, only here."""

from __future__ import annotations

from collections.abc import Callable, Container
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

# torch 2.13 renamed the first two and warns if the old names are used.
all_gather_into: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_into: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
assert_async: Any = torch._assert_async


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
