"""In: results and messages of this process. Out: results on standard output, messages through `logging` (messages.py).
Does not change the streams on import: the program calls the functions, after which a failed write raises no error."""

from __future__ import annotations

import io
import os
import select
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from codescent.base import writing
from codescent.base.messages import INFO, WARNING, message, message_once
from codescent.base.visible import visible

MOST_EARLY_BYTES = 65_536
"""So much of what is printed before `copy_to` is kept for it."""

_copy: int | None = None  # descriptor of a file that gets all that is printed
_early: list[bytes] = []
_early_bytes = 0
_failed: set[str] = set()  # streams that have lost output
unreported: list[dict[str, str]] = []
"""What `new_failures` would return."""


def open_closed_streams() -> None:
    """Open /dev/null for standard input, output and error if they are closed.

    Without this the next file, such as a checkpoint, gets descriptor 0, 1 or 2. Native code would print into it.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def escape_what_a_stream_cannot_write() -> None:
    """Characters that the encoding of standard output lacks are escaped, as Python does on standard error."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def tolerate_write_errors() -> None:
    """Replace sys.stdout and sys.stderr: a full disk, a closed pipe or a closed terminal raises no error any more."""
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(
            io.BufferedWriter(_Tolerant(number, stream)), before.encoding, "backslashreplace", line_buffering=True
        )
        for number, stream, before in ((1, "standard output", sys.stdout), (2, "standard error", sys.stderr))
    )


def say(lines: Iterable[str]) -> None:
    """Print lines of a result to standard output, with control characters escaped."""
    for line in lines:
        print(visible(line))


def warn(*lines: str, level: int = WARNING) -> None:
    """Log lines as one message, with control characters escaped; the command prints it to standard error.

    In one write: ranks that share a terminal would mix their words otherwise. Raises OSError: it cannot be written.
    """
    if lines:
        message("\n".join(map(visible, lines)), level)


def warn_once(line: str) -> None:
    """Log a line as `warn` does, once in a command."""
    message_once(visible(line), WARNING)


def note(*lines: str) -> None:
    """Log lines on what is done, or what comes next, as `warn` does: --quiet leaves them out."""
    warn(*lines, level=INFO)


def progress(lines: Iterable[str]) -> None:
    """Log lines on what is done now; the command prints them to standard output."""
    for line in lines:
        message(visible(line), INFO, print)


def new_line() -> str:
    """What a message begins with that comes at any time: a terminal has a bar or ^C in its last line."""
    return "\n" if os.isatty(2) else ""


def copy_to(path: Path) -> None:
    """From now on append to a file, too, what this process prints, and what it has printed already.

    The folder of the file is made in one that the user has named.
    Only what Python prints, with `tolerate_write_errors`: native code writes past it. Raises OSError.
    """
    global _copy
    writing.make_folder(path.parent)
    if _early or isinstance(getattr(getattr(sys.stderr, "buffer", None), "raw", None), _Tolerant):
        with writing.open_own(path, path.parent.parent, appends=True, makes=True) as file:
            _copy = os.dup(file.fileno())
        os.write(_copy, b"".join(_early))
    _early.clear()


def _keep(data: bytes) -> None:
    """Append to the copy, or keep it until there is one. A copy that cannot be written is no error: the stream is."""
    global _early_bytes
    if _copy is not None:
        with suppress(OSError):
            os.write(_copy, data)
    elif _early_bytes < MOST_EARLY_BYTES:
        _early.append(data)
        _early_bytes += len(data)


def new_failures() -> list[dict[str, str]]:
    """The streams that have lost output since the last call, each with the cause. A stream is reported once."""
    lost = unreported[:]
    del unreported[: len(lost)]  # another thread may have added one meanwhile
    return lost


class _Tolerant(io.FileIO):
    """A file whose writes never raise. A failed write is dropped; the next write is tried normally."""

    def __init__(self, descriptor: int, stream: str) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self.stream = stream

    def write(self, data: Any) -> int:
        _keep(bytes(data))
        try:
            while (count := super().write(data)) is None:  # a non-blocking pipe whose reader is slow: wait
                select.select([], [self.fileno()], [])
        except OSError as error:
            if self.stream not in _failed:
                _failed.add(self.stream)
                unreported.append({"stream": self.stream, "why": error.strerror or str(error)})
            return len(data)
        return int(count)
