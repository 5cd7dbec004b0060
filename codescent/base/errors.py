"""In: every problem found in what the user gave, or why a run failed. Out: one exception that the command line prints.
Does not print, does not exit, and is never raised for a fault of our own."""

from __future__ import annotations

from typing import ClassVar


class UserError(Exception):
    """What the user gave cannot be used: every problem, a sentence each: where it is, and what would be right.

    `exit_code` is the command line's: 2, but of a subclass whose cause is not what the user gave.
    """

    exit_code: ClassVar[int] = 2

    def __init__(self, *problems: str) -> None:
        self.problems: tuple[str, ...] = problems
        super().__init__("\n".join(problems))


class RunFailed(UserError):
    """What the user gave could be used, but the run cannot go on: why, and what to do, a sentence each."""

    exit_code = 1
