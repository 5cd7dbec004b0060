"""In: the section [optimizer]. Out: the class of an update rule of the user; how many tensors of state a rule keeps.
Does not update weights (train/optimize.py does) and imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from codescent.base import own_names
from codescent.base.own_names import is_own_name

if TYPE_CHECKING:
    import torch

    from codescent.config.optimizer import Optimizer

KEY = "optimizer.kind"
ONE_STATE_TENSOR = ("sgd", "adagrad")
"""Kinds of torch's optimizers with one state tensor per parameter. The others have two; sgd and rmsprop have one fewer
without momentum. Of muon this is the AdamW part: the strategy Muon sets the others."""


class UpdateRule:
    """The base class of update rules of your own: `optimizer.kind = "mymodule:MyRule"` (docs/own_names.md).

    A rule names an optimizer of torch and says what plans and layouts must know of it. codescent clips gradients, keeps
    master weights, sets `group["lr"]` before each step, and saves the state. The optimizer updates each tensor that
    has a gradient by itself. All that it keeps between steps are tensors in `state[parameter]`, which begin at zero.
    This is tried on small tensors before a run begins.

    Attributes:
        state: names of the state tensors that have the shape of their parameter, such as ("exp_avg", "exp_avg_sq").
        elementwise: whether each element is updated by itself. Only then a rank may have a part of a tensor: False
            refuses layouts that cut tensors.
        reads: keys of [optimizer] that it reads, beside `learning_rate`, `weight_decay` and those of the schedule.
    """

    state: tuple[str, ...] = ()
    elementwise: bool = False
    reads: tuple[str, ...] = ()

    def make(self, groups: list[dict[str, Any]], optimizer: Optimizer) -> torch.optim.Optimizer:
        """The optimizer.

        Args:
            groups: for the first argument of torch's optimizers: each has "params" and its "weight_decay".
            optimizer: the section [optimizer]: its keys are attributes, such as `optimizer.beta1`.
        """
        raise NotImplementedError

    def refuse(self, optimizer: Optimizer) -> Iterator[str]:
        """Problems of its keys, each in a sentence."""
        yield from ()


def own_rule(optimizer: Optimizer) -> UpdateRule | None:
    """The update rule of the user that the section names; None: it names another. Raises UserError: there is none."""
    if not is_own_name(optimizer.kind):
        return None
    return own_names.instance(KEY, optimizer.kind, UpdateRule, needs=("make", "state"))


def state_tensors(optimizer: Optimizer) -> int:
    """Number of state tensors of a parameter that have its shape. Raises UserError: see `own_rule`."""
    if (rule := own_rule(optimizer)) is not None:
        return len(rule.state)
    without = optimizer.kind in ("sgd", "rmsprop") and optimizer.momentum == 0
    return (1 if optimizer.kind in ONE_STATE_TENSOR else 2) - without
