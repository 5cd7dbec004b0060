"""In: the log file of a rank. Out: its end, to be printed.
Does not write a log (local.py has the ranks write it)."""

from __future__ import annotations

import os
from pathlib import Path

from codescent.base.reading import open_regular

SHOWN_BYTES = 20_000
"""Bytes at the end of a log that are printed."""


def tail(log: Path) -> str:
    """The end of a log, and how much is before it; why it cannot be read."""
    try:
        with open_regular(log) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - SHOWN_BYTES))
            text = file.read().decode("utf-8", errors="replace").rstrip("\n")
    except OSError as error:  # a system may delete temporary folders
        return f"[{log}: {error.strerror}]"
    return text if size <= SHOWN_BYTES else f"[... {size - SHOWN_BYTES} bytes before this]\n{text}"
