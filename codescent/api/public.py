"""In: a function of the API. Out: the same function, which checks types of arguments and has short tracebacks.
Does not change other exceptions than UserError: they are bugs of codescent, or of the caller, and need every line."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from numbers import Integral, Real
from types import NoneType
from typing import ParamSpec, TypeVar

import numpy as np

from codescent.base.errors import UserError
from codescent.base.own_names import of_user

P = ParamSpec("P")
R = TypeVar("R")

_TYPES: Mapping[str, tuple[type, str]] = {
    "str": (str, "a string"),
    "os.PathLike[str]": (os.PathLike, "a path"),
    "int": (Integral, "a whole number"),
    "float": (Real, "a number"),
    "bool": (bool, "True or False"),
    "None": (NoneType, "None"),
}
"""What is checked of an annotation, which may join some of these with "|": its type, and words for it."""


def public(function: Callable[P, R]) -> Callable[P, R]:
    """A function of the API.

    Arguments whose types are not those of its annotations raise one UserError. Numbers of numpy become Python's.
    UserErrors do not show the lines of this package between caller and message. Their cause is an exception of code
    that the config names, with its traceback, or None.
    """
    signature = inspect.signature(function)

    @wraps(function)
    def short(*args: P.args, **keywords: P.kwargs) -> R:
        try:
            given = signature.bind(*args, **keywords)
            for name, value in given.arguments.items():
                given.arguments[name] = value.item() if isinstance(value, np.generic) else value
            if problems := list(_wrong_types(signature, given.arguments)):
                raise UserError(*problems)
            return function(*given.args, **given.kwargs)
        except UserError as error:
            is_callers = error.__cause__ is not None and of_user(error.__cause__)
            raise error.with_traceback(None) from error.__cause__ if is_callers else None

    return short


def _wrong_types(signature: inspect.Signature, given: Mapping[str, object]) -> Iterator[str]:
    """Yield a sentence for each argument that has none of the types of its annotation."""
    for name, value in given.items():
        words = str(signature.parameters[name].annotation).split(" | ")
        if not set(words) <= set(_TYPES):
            continue  # a config, or overrides: words.py checks them
        types, wanted = zip(*(_TYPES[word] for word in words), strict=True)
        is_bool = isinstance(value, bool) and bool not in types  # which Python takes for a whole number
        if is_bool or not isinstance(value, types):
            yield f"{name}: given {value!r}; must be {' or '.join(filter(None, (', '.join(wanted[:-1]), wanted[-1])))}"
