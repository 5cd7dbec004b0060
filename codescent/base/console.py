"""In: a standard stream. Out: a console of rich, which moves the cursor on a terminal alone; what it would print.
Does not print and knows no table, bar or colour."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from io import StringIO

from rich.console import Console, RenderableType


def new_console(*, stderr: bool = False, width: int | None = None, soft_wrap: bool = False) -> Console:
    """A console that prints text.

    Rich takes a stream for a terminal if FORCE_COLOR is set, which notebooks set for each kernel and CI for each job.
    A bar would then be some hundred lines with escape sequences.

    Args:
        stderr: print to the standard error, not to the standard output.
        width: of a line in characters; None: that of the terminal.
        soft_wrap: leave long lines to the terminal.
    """
    is_terminal = (sys.stderr if stderr else sys.stdout).isatty()
    return Console(
        stderr=stderr,
        width=width,
        soft_wrap=soft_wrap,
        highlight=False,
        force_terminal=is_terminal,
        force_jupyter=False,
    )


def as_text(parts: Iterable[RenderableType], width: int) -> str:
    """What a console of this width prints, without colours."""
    text = StringIO()
    console = Console(file=text, width=width, color_system=None, force_terminal=False, highlight=False)
    for one in parts:
        console.print(one)
    return text.getvalue()
