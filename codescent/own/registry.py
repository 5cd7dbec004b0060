"""In: modules that `distribute` has changed. Out: their strategies; an error if the script changes or wraps one later.
Does not distribute (distribute.py does) and makes no collective: each rank looks at its own modules."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from codescent.base.errors import UserError
from codescent.strategies.fully_shard import free_gathered

if TYPE_CHECKING:
    from codescent.own.average import AveragedGradients
    from codescent.own.rounds import Options, Rounds

WRAPPERS = (DataParallel, DistributedDataParallel)
"""Modules of torch that sum gradients themselves. With them gradients would be summed twice, or lost."""
LISTED = 3
"""Largest number of parameters that a message names."""


@dataclass(frozen=True)
class Distributed:
    """How a module was distributed.

    Attributes:
        strategy: its name.
        averaged: the averaging of the gradients of replicated parameters.
        parameters: all parameters of the module after `distribute`, and whether each is trained.
        replaced: the parameters that became shards, by id.
        options: how whole models exchange gradients or weights.
        rounds: of ranks that train apart; None: they average gradients in each step.
    """

    strategy: str
    averaged: AveragedGradients
    parameters: dict[torch.Tensor, bool]
    replaced: dict[int, ref[torch.Tensor]]
    options: Options
    rounds: Rounds | None

    def has_replaced(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter was one of the module before `distribute`, and is not any more."""
        old = self.replaced.get(id(parameter))
        return old is not None and old() is parameter


_modules: WeakKeyDictionary[nn.Module, Distributed] = WeakKeyDictionary()
_wrappers: WeakSet[nn.Module] = WeakSet()


def add(
    module: nn.Module,
    strategy: str,
    averaged: AveragedGradients,
    before: Iterable[torch.Tensor],
    options: Options,
    rounds: Rounds | None,
) -> None:
    """Remember a module that was distributed now. `before`: its parameters before."""
    known: dict[torch.Tensor, bool] = {p: p.requires_grad for p in module.parameters()}
    replaced = {id(parameter): ref(parameter) for parameter in before if parameter not in known}
    _modules[module] = Distributed(strategy, averaged, known, replaced, options, rounds)


def everything() -> list[tuple[nn.Module, Distributed]]:
    """All modules that are distributed."""
    return list(_modules.items())


def strategy_of(module: nn.Module) -> str | None:
    """The strategy by which a module, or a trained parameter of it, is distributed already; None: it is not."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for one, known in _modules.items():
        if one is module or any(parameter in known.parameters for parameter in trained):
            return known.strategy
    return None


def find(module: nn.Module, caller: str) -> tuple[nn.Module, Distributed]:
    """The distributed module (without what torch.compile has put around it, or with it), and how it was distributed.

    Raises UserError: it was not.
    """
    for one in (module, getattr(module, "_orig_mod", module)):
        if one in _modules:
            return one, _modules[one]
    for one, known in list(_modules.items()):
        if getattr(one, "_orig_mod", None) is module:
            return one, known
    raise UserError(
        f"codescent.{caller}: this {type(module).__name__} is not distributed: call codescent.distribute first"
    )


def refuse_other(module: nn.Module, caller: str) -> None:
    """Raise UserError if a module is neither distributed nor a part of a distributed module."""
    parameters = set(module.parameters())
    if not parameters or not any(parameters <= known.parameters.keys() for known in _modules.values()):
        find(module, caller)


def exchanging(module: nn.Module, caller: str) -> Distributed | None:
    """How a module was distributed, if with average_every or wire; else None.

    Raises UserError: it is a part of such a module, or such a module is a part of it.
    """
    mine = set(module.parameters())
    if not any(known.options.exchanges and not mine.isdisjoint(known.parameters) for known in _modules.values()):
        return None
    try:
        return find(module, caller)[1]
    except UserError:
        raise UserError(
            f"codescent.{caller}: this {type(module).__name__} shares parameters with a module that was distributed "
            "with average_every or wire: give that module"
        ) from None


def wrapper_of(module: nn.Module) -> str | None:
    """The class of a wrapper of torch that a module is in, or has in it; None: there is none."""
    inside = [one for one in module.modules() if isinstance(one, WRAPPERS)]
    mine = set(module.parameters())
    around = [one for one in _wrappers if any(parameter in mine for parameter in one.parameters())]
    return next((type(one).__name__ for one in (*inside, *around)), None)


def _note_wrapper(parent: nn.Module, _name: str, child: nn.Module | None) -> None:
    """When a wrapper of torch gets its module: refuse a module that is distributed, remember the wrapper of others."""
    if isinstance(parent, WRAPPERS) and child is not None:
        known = {parameter for one in _modules.values() for parameter in one.parameters}
        if any(one in _modules for one in child.modules()) or any(one in known for one in child.parameters()):
            raise UserError(
                f"codescent.distribute: {type(parent).__name__} around a module that is distributed already would sum "
                "its gradients twice: leave it out"
            )
        _wrappers.add(parent)


def _before_step(optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
    """Before a step of any optimizer: refuse a change of a module whose parameters it updates; begin its round."""
    updated = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    for module, known in list(_modules.items()):
        is_its = any(parameter in known.parameters for parameter in updated)
        if is_its and known.replaced:
            free_gathered(module)  # else the module holds the gathered weights in the place of its parameters
        if any(known.has_replaced(parameter) for parameter in updated):
            raise UserError(
                f"codescent.distribute: this {type(optimizer).__name__} has parameters that {known.strategy} has "
                "replaced by shards, so its steps change nothing: create it after codescent.distribute"
            )
        found = [(name, p) for name, p in module.named_parameters() if is_its or p in updated]
        if new := [name for name, p in found if p not in known.parameters]:
            raise UserError(
                f"codescent.distribute: {_listed(new)}: added or replaced after the call, so each rank has its own: "
                "change the module before codescent.distribute"
            )
        if unfrozen := [name for name, p in found if p.requires_grad and not known.parameters[p]]:
            raise UserError(
                f"codescent.distribute: {_listed(unfrozen)}: trained now, but frozen (requires_grad=False) at the time "
                "of the call, so ranks do not average its gradient: set requires_grad before codescent.distribute; "
                "freezing is possible after it"
            )
        if is_its and known.rounds is not None:
            known.rounds.before_step()


def _listed(names: list[str]) -> str:
    more = len(names) - LISTED
    return ", ".join(names[:LISTED]) + (f" and {more} more" if more > 0 else "")


register_module_module_registration_hook(_note_wrapper)
register_optimizer_step_pre_hook(_before_step)
