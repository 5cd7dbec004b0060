"""In: the arguments of a public function. Out: its result, or one sentence for each argument of a wrong type.
Does not check what depends on the ranks or on other arguments: each function does."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import wraps
from numbers import Integral
from os import PathLike
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

from codescent.base.agreement import together
from codescent.base.errors import UserError
from codescent.own.failure import watch

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Kind:
    """What an argument must be: in words, and as a function."""

    words: str
    fits: Callable[[Any], bool]

    def or_none(self) -> Kind:
        """The same kind, or None."""
        return Kind(f"{self.words}, or None", lambda value: value is None or self.fits(value))


def number(value: object) -> float | None:
    """A number, or a tensor of one element, as float. None: it is neither."""
    if isinstance(value, torch.Tensor):
        return None if value.numel() != 1 or value.is_complex() else float(value.detach())
    try:
        return float(value) if hasattr(value, "__float__") else None
    except (TypeError, ValueError, OverflowError):
        return None


def shown(value: object) -> str:
    """A wrong argument in a sentence: short values as they are, others by type."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if value is None or isinstance(value, int | float | str):
        return repr(value)
    return f"an object of type {type(value).__name__}"


def _whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _finite(value: object) -> float:
    """A number; -1 for what is none."""
    found = number(value)
    return -1.0 if found is None else found


def _are_modules(value: object) -> bool:
    listed = isinstance(value, Iterable) and not isinstance(value, str | Iterator | torch.Tensor)
    return listed and all(isinstance(one, nn.Module) for one in value)  # type: ignore[attr-defined]


def _has_length(value: Any) -> bool:
    try:
        return not isinstance(value, torch.utils.data.DataLoader) and len(value) >= 0
    except (TypeError, NotImplementedError):
        return False


MODULE = Kind("a torch.nn.Module", lambda value: isinstance(value, nn.Module))
MODULES = Kind("a list of torch.nn.Modules", _are_modules)
OPTIMIZER = Kind("a torch.optim.Optimizer", lambda value: isinstance(value, torch.optim.Optimizer))
DATASET = Kind("a dataset with a length (not a DataLoader)", _has_length)
PATH = Kind("a path (str or pathlib.Path)", lambda value: isinstance(value, str | PathLike))
TEXT = Kind("a string", lambda value: isinstance(value, str))
TRUE_OR_FALSE = Kind("True or False", lambda value: isinstance(value, bool))
WHOLE = Kind("a whole number", _whole)
COUNT = Kind("a whole number above 0", lambda value: _whole(value) and value > 0)
POSITIVE = Kind("a number above 0", lambda value: (number(value) or 0.0) > 0)
FINITE = Kind("a finite number above 0", lambda value: 0 < _finite(value) < math.inf)
MOMENTUM = Kind("a number of at least 0 and below 1", lambda value: 0 <= _finite(value) < 1)
SECONDS = Kind("a number of seconds above 0", lambda value: 0 < (number(value) or 0.0) < math.inf)


def public(name: str, /, *, collective: bool = False, **kinds: Kind) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a function public: a wrong call of it raises UserError, which ends a script in one line.

    Args:
        name: of the function in messages.
        collective: True: if the call is wrong on one rank, every rank raises. Costs a small collective.
        kinds: of the arguments, by name.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            def check() -> None:
                _refuse(name, signature, kinds, args, kwargs)

            watch()
            if collective:
                together(UserError, check)
            else:
                check()
            return function(*args, **kwargs)

        return call

    return decorate


def _refuse(
    name: str, signature: inspect.Signature, kinds: Mapping[str, Kind], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    try:
        given = signature.bind(*args, **kwargs).arguments
    except TypeError as error:
        bare = [one.replace(annotation=one.empty) for one in signature.parameters.values() if one.name != "self"]
        form = signature.replace(parameters=bare, return_annotation=signature.empty)
        raise UserError(f"{name}: {error}: the form is {name.removeprefix('codescent: ')}{form}") from None
    wrong = [argument for argument, kind in kinds.items() if argument in given and not kind.fits(given[argument])]
    if wrong:
        raise UserError(*(f"{name}: {one}: must be {kinds[one].words}, not {shown(given[one])}" for one in wrong))
