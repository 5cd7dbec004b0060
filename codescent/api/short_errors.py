"""In: a function of the API that raises UserError. Out: the same function; its traceback shows the caller, not us.
Does not change other exceptions: they are bugs of codescent, or the caller's own, and need every line."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from codescent.base.errors import UserError

P = ParamSpec("P")
R = TypeVar("R")


def with_short_errors(function: Callable[P, R]) -> Callable[P, R]:
    """A function whose UserErrors have neither a cause nor the lines of this package between caller and message."""

    @wraps(function)
    def short(*args: P.args, **keywords: P.kwargs) -> R:
        try:
            return function(*args, **keywords)
        except UserError as error:
            raise error.with_traceback(None) from None

    return short
