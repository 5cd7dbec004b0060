"""In: every step of every torch optimizer in this process, from the import of this file on. Out: their number;
parts of a script with their names, for the launcher. Does not change a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from codescent.base.progress import SCRIPT, OwnPage

_steps: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()
_page: OwnPage | None = None


def steps_of(optimizer: torch.optim.Optimizer) -> int:
    """How many times `optimizer.step` was called, over all runs that were loaded one after the other."""
    return _steps.get(optimizer, 0)


def most_steps() -> int | None:
    """The steps of the optimizer that has taken most of them; None: none was taken."""
    return max(_steps.values(), default=None)


def set_steps(optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Set the number, to continue from a save."""
    _steps[optimizer] = steps


def show_on(page: OwnPage | None) -> None:
    """From now on the page of this rank has the number of steps; None: no longer, or there is no page."""
    global _page
    _page = page
    if page is not None:
        page.enter(SCRIPT)


@contextmanager
def section(name: str) -> Iterator[None]:
    """A block that the page of this rank names."""
    before = "" if _page is None else _page.enter(name)
    try:
        yield
    finally:
        if _page is not None:
            _page.enter(before)


def _count(optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
    _steps[optimizer] = steps_of(optimizer) + 1
    if _page is not None:
        _page.at(most_steps() or 0)
        if _page.section == SCRIPT:
            _page.enter("")


register_optimizer_step_post_hook(_count)
