"""In: sentences that describe wrong user input or a failed run. Out: exceptions; the command line prints their text.
Does not print, does not exit the process, and is not for bugs of codescent."""

from __future__ import annotations

from typing import ClassVar


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
