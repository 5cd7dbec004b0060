"""In: this process's standard output and error. Out: the same; what cannot be written is told once, not raised.
Does not touch other files, and changes nothing until it is asked to: by the program, never by who imports it."""

from __future__ import annotations

import io
import os
import select
import sys
from collections.abc import Iterable
from typing import Any

from codescent.base.visible import visible

_why: dict[str, str] = {}
_told: set[str] = set()


def open_closed() -> None:
    """Open /dev/null where standard input, output or error is closed.

    Else a file of ours, such as a checkpoint, would get its number, and what native code prints.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def endure() -> None:
    """Let standard output and error survive a full disk, a closed pipe and a closed terminal, to the process's end."""
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(
            io.BufferedWriter(_Enduring(number, stream)), before.encoding, "backslashreplace", line_buffering=True
        )
        for number, stream, before in ((1, "standard output", sys.stdout), (2, "standard error", sys.stderr))
    )


def say(lines: Iterable[str]) -> None:
    """Print lines, of which a file or a user may have brought a part, to the standard output."""
    for line in lines:
        print(visible(line))


def warn(text: str) -> None:
    """Print the like at once to the standard error."""
    print(visible(text), file=sys.stderr, flush=True)


def news() -> list[dict[str, str]]:
    """Which of the two has lost something, and why; each of them once."""
    lost = [{"stream": stream, "why": why} for stream, why in _why.items() if stream not in _told]
    _told.update(one["stream"] for one in lost)
    return lost


class _Enduring(io.FileIO):
    """A file descriptor whose writes succeed. Later ones are tried again: a full disk may have room by then."""

    def __init__(self, descriptor: int, stream: str) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self.stream = stream

    def write(self, data: Any) -> int:
        try:
            while (count := super().write(data)) is None:  # set not to block by its reader, who is slow
                select.select([], [self.fileno()], [])
        except OSError as error:
            _why.setdefault(self.stream, error.strerror or str(error))
            return len(data)
        return int(count)
