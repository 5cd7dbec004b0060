"""In: sentences that describe wrong user input or a failed run. Out: exceptions; the command line prints their text.
Does not print, does not exit the process, and is not for bugs of codescent."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import ClassVar, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class UserError(Exception):
    """The user's input is wrong. Each problem is one sentence: the place of the error and the correct form.

    `exit_code` is the exit code of the command: 2. A subclass with another cause has another code.
    `everywhere`: every rank raises this error, because the ranks have agreed on it (base/agreement.py).
    """

    exit_code: ClassVar[int] = 2

    def __init__(self, *problems: str) -> None:
        self.problems: tuple[str, ...] = problems
        self.everywhere = False
        super().__init__("\n".join(problems))


class RunFailed(UserError):
    """The input is correct, but the run cannot continue. The sentences give the cause and what the user can do."""

    exit_code = 1


def of_each(keys: Iterable[K], get: Callable[[K], V], where: Callable[[K], str] = lambda _: "") -> dict[K, V]:
    """What `get` returns for each key, in order. `where`: what a problem of a key begins with.

    Raises UserError: the problems of all keys, each once.
    """
    found, problems = dict[K, V](), list[str]()
    for key in keys:
        try:
            found[key] = get(key)
        except UserError as error:
            problems += [f"{where(key)}{problem}" for problem in error.problems]
    if problems:
        raise UserError(*dict.fromkeys(problems))
    return found
