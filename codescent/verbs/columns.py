"""In: rows of a name and lines of text. Out: two aligned columns as text, as wide as the terminal.
Does not print. Without a terminal no line is broken, so that a program or `grep` finds each line whole."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence

GAP = "  "
NARROWEST = 24
"""Smallest width of the second column. On a narrower terminal the lines are broken by the terminal."""


def columns(rows: Sequence[tuple[str, Sequence[str]]], width: int | None = None) -> str:
    """The rows as text, one line below the other.

    Args:
        rows: a name and its lines.
        width: columns of the terminal; None: those of standard output, or without limit if it is no terminal.
    """
    if width is None and sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
    names = max(len(name) for name, _ in rows)
    room = None if width is None else max(NARROWEST, width - names - len(GAP))
    text = []
    for name, lines in rows:
        for number, line in enumerate(part for whole in lines for part in _broken(whole, room)):
            text.append(f"{'' if number else name:<{names}}{GAP}{line}".rstrip())
    return "\n".join(text)


def _broken(line: str, room: int | None) -> list[str]:
    """A line in pieces of at most `room` characters, broken between words; later pieces are indented."""
    if room is None or len(line) <= room:
        return [line]
    return textwrap.wrap(line, room, subsequent_indent=GAP, break_long_words=False, break_on_hyphens=False)
