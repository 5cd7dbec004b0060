"""In: words of commands. Out: text of bash that runs them with these words; what bash says against lines of a user.
Does not know a launcher, and not a job (lines.py does)."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Iterable, Sequence

from codescent.base.visible import visible

WIDTH = 110
INDENT = "    "
NAME = re.compile(r"\$(\w+|\{\w+\})", re.ASCII)
"""A variable in a text."""
SPECIAL = re.compile(r"[\\\"`]|\$(?!\w|\{\w+\})", re.ASCII)
"""What bash would read within double quotes, apart from variables."""


CHECK = ("bash", "-O", "extglob", "-n")
"""Reads a script without running it. Bash reads all of it first: a line that sets extglob would not count yet."""


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


def wrong_bash(lines: Sequence[str]) -> str:
    """What bash says against lines that are to be a part of a script, without running them; "": nothing, or there is
    no bash here.

    A warning counts, too: of a text (<<END) without its end. The lines are read in a group, too: a backslash at their
    end would join them with what follows.
    """
    env = {"LC_ALL": "C", "PATH": os.environ.get("PATH", os.defpath)}
    for text in ("\n".join(lines), "\n".join(["{ :", *lines, "}"])):
        try:
            done = subprocess.run(CHECK, input=text.encode(), env=env, check=False, capture_output=True)
        except OSError:
            return ""
        if said := visible(done.stderr.decode(errors="replace")).splitlines():
            return said[0].removeprefix("bash: ")
    return ""


def comment(text: str) -> list[str]:
    """A text as lines of a comment. Characters that do not print are shown by their numbers."""
    return [f"# {visible(line)}" for line in text.splitlines()]
