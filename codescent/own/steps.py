"""In: every step of every torch optimizer in this process, from the import of this file on. Out: their number.
Does not change a step. `codescent.init` imports this file; `codescent.load` sets the number."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

_steps: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()


def steps_of(optimizer: torch.optim.Optimizer) -> int:
    """How many times `optimizer.step` was called, over all runs that were loaded one after the other."""
    return _steps.get(optimizer, 0)


def most_steps() -> int | None:
    """The steps of the optimizer that has taken most of them; None: none was taken."""
    return max(_steps.values(), default=None)


def set_steps(optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Set the number, to continue from a save."""
    _steps[optimizer] = steps


def _count(optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
    _steps[optimizer] = steps_of(optimizer) + 1


register_optimizer_step_post_hook(_count)
