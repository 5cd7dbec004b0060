"""In: words of commands. Out: text of bash that runs them with these words, whatever characters they have.
Does not know a launcher, and not a job (lines.py does)."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable

from codescent.base.visible import visible

WIDTH = 110
INDENT = "    "
NAME = re.compile(r"\$(\w+|\{\w+\})", re.ASCII)
"""A variable in a text."""
SPECIAL = re.compile(r"[\\\"`]|\$(?!\w|\{\w+\})", re.ASCII)
"""What bash would read within double quotes, apart from variables."""


class Raw(str):
    """Text that bash shall expand, such as "$SLURM_JOB_ID": it is not quoted."""

    __slots__ = ()


def quoted(word: str) -> str:
    """A word as bash reads it back."""
    return str(word) if isinstance(word, Raw) else shlex.quote(word)


def expandable(text: str) -> str:
    """A word as bash reads it back, in which bash puts the values of variables, such as /scratch/$USER."""
    if NAME.search(text) is None:
        return shlex.quote(text)
    return f'"{SPECIAL.sub(lambda found: chr(92) + found[0], text)}"'


def command(words: Iterable[str], after: str = "") -> str:
    """A command with these words, broken into lines. `after`: text of bash behind the last word."""
    lines, line = [], ""
    for piece in [*map(quoted, words), *([after] if after else [])]:
        if line and len(line) + len(piece) + 3 > WIDTH:
            lines.append(line)
            line = INDENT + piece
        else:
            line = f"{line} {piece}" if line else piece
    return " \\\n".join([*lines, line])


def comment(text: str) -> list[str]:
    """A text as lines of a comment. Characters that do not print are shown by their numbers."""
    return [f"# {visible(line)}" for line in text.splitlines()]
