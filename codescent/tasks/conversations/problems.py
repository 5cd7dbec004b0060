"""In: lines of a file and why they cannot be used. Out: one message for each reason, with the number of its lines.
Does not know why: the readers of lines do."""

from __future__ import annotations

import re
from pathlib import Path

from codescent.base.counted import counted
from codescent.base.errors import UserError

MOST_PROBLEMS = 20
_NUMBER = re.compile(r"\b(message|part) \d+")


class Problems:
    """The reasons, in order, each with the first line that has it and the number of lines."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[str, set[str]]] = {}

    def add(self, where: str, why: str) -> None:
        """Add a reason for the line `where`. Reasons that differ in the number of a message are one reason."""
        key = _NUMBER.sub(r"\1", why)
        self._found.setdefault(key, (f"{where}: {why}", set()))[1].add(where)

    def refuse(self, path: Path) -> None:
        """Raise UserError if there are reasons: the first ones, and the number of further ones."""
        more = len(self._found) - MOST_PROBLEMS
        messages = [
            first + (f" (and {counted(len(lines) - 1, 'more line')})" if len(lines) > 1 else "")
            for first, lines in list(self._found.values())[:MOST_PROBLEMS]
        ]
        if messages:
            raise UserError(*messages, *([f"{path}: {counted(more, 'more problem')}"] if more > 0 else []))
