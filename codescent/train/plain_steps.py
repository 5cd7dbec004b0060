"""In: torch's optimizers. Out: they are made, and their steps, without an import of torch's compiler.
Does not change what an optimizer computes. Where the compiler is loaded already, torch's own functions are called."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.autograd.profiler import record_function
from torch.optim import Optimizer
from torch.optim import optimizer as library

from codescent.operators.compiled import COMPILER


@contextmanager
def making() -> Iterator[None]:
    """A block in which optimizers are made."""
    method = Optimizer.add_param_group
    if COMPILER not in sys.modules:
        Optimizer.add_param_group = inspect.unwrap(method)  # type: ignore[method-assign]
    try:
        yield
    finally:
        Optimizer.add_param_group = method  # type: ignore[method-assign]


def step_of(optimizer: Optimizer) -> Callable[[], object]:
    """Its `step`. Of an optimizer of torch it is what is below torch's wrappers, while it has no hooks."""
    kind = type(optimizer)
    if COMPILER in sys.modules or not kind.__module__.startswith("torch.optim."):
        return optimizer.step
    if optimizer.defaults.get("differentiable", False):
        return optimizer.step
    plain, range_name = inspect.unwrap(kind.step), f"Optimizer.step#{kind.__name__}.step"  # torch's name, for profiles

    def step() -> object:
        if _has_hooks(optimizer):
            return optimizer.step()
        with torch.no_grad(), record_function(range_name):
            return plain(optimizer)

    return step


def _has_hooks(optimizer: Optimizer) -> bool:
    """Whether functions are to be called before or after its steps, or those of every optimizer."""
    own = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    return any((*own, library._global_optimizer_pre_hooks, library._global_optimizer_post_hooks))
