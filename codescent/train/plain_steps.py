"""In: torch's optimizers. Out: they are made, and take steps, without an import of torch's compiler.
Does not change what an optimizer computes. Where the compiler is loaded already, torch's own functions are called."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as library

COMPILER = "torch._dynamo"
"""torch's optimizers import it, so that compiled code leaves them alone. That takes 1.1 s, and eager code needs it
nowhere."""


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


def take_step(optimizer: Optimizer) -> None:
    """One step of an optimizer. If it has hooks, or its class is not torch's own, its `step` is called."""
    kind = type(optimizer)
    if COMPILER in sys.modules or not kind.__module__.startswith("torch.optim.") or _has_hooks(optimizer):
        optimizer.step()
        return
    with torch.set_grad_enabled(optimizer.defaults.get("differentiable", False)):  # as torch's wrapper does
        inspect.unwrap(kind.step)(optimizer)


def _has_hooks(optimizer: Optimizer) -> bool:
    """Whether functions are to be called before or after its steps, or those of every optimizer."""
    own = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    return any((*own, library._global_optimizer_pre_hooks, library._global_optimizer_post_hooks))
