"""In: the standard output of rank 0. Out: its text in this process's standard output, where that is no descriptor.
Does not read the logs of other ranks (logs.py does)."""

from __future__ import annotations

import io
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import IO

STDOUT = 1
REST_S = 2.0
"""Seconds for the last lines after the ranks have ended: a process that rank 0 has left may hold its output open."""


class RankOutput:
    """Where rank 0 writes: descriptor 1, if Python prints there, too; else a pipe whose lines are printed.

    In a notebook, or inside of redirect_stdout, Python prints elsewhere.
    """

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []

    @property
    def target(self) -> int | None:
        """For `subprocess.Popen`: None or PIPE."""
        return None if _prints_to_descriptor() else subprocess.PIPE

    def follow(self, output: IO[bytes] | None) -> None:
        """Print the lines of a process that comes from `Popen` with `target`. They come until its output is closed."""
        if output is not None:
            thread = threading.Thread(target=_print_lines, args=(output,), name="codescent rank 0", daemon=True)
            self._threads.append(thread)
            thread.start()

    def finish(self) -> None:
        """Wait for the last lines."""
        end_s = time.monotonic() + REST_S
        for thread in self._threads:
            thread.join(max(0.0, end_s - time.monotonic()))


def _prints_to_descriptor() -> bool:
    try:
        return sys.stdout.fileno() == STDOUT
    except (AttributeError, OSError, ValueError):  # no stream, or one without a descriptor
        return False


def _print_lines(output: IO[bytes]) -> None:
    """Read until the end, in any case: else the rank would wait for a reader."""
    with io.TextIOWrapper(output, errors="replace") as lines:
        for line in lines:
            with suppress(AttributeError, OSError, ValueError):  # closed, or full
                sys.stdout.write(line)
                sys.stdout.flush()
