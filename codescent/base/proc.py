"""In: the id of a process. Out: what /proc says of it, as fields; or that /proc cannot tell.
Does not say what the fields mean (launch/process_state.py does)."""

from __future__ import annotations

import os
import sys
from pathlib import Path

PROC = Path("/proc")


def stat_of(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat after the name. Empty: there is no such process. None: /proc cannot tell.

    There may be no /proc.
    """
    try:
        if not shows_own_numbers():
            return None
        stat = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return [] if os.path.lexists(PROC / "self") else None
    except OSError:  # such as too many open files
        return None
    return stat.rpartition(")")[2].split()


def shows_own_numbers() -> bool:
    """Whether the numbers that /proc and psutil have for processes are those of this process's signals.

    In a new PID namespace /proc may still be that of another one: then a number is that of another process.
    """
    if sys.platform != "linux":
        return True
    try:
        return str((PROC / "self").readlink()) == str(os.getpid())
    except OSError:
        return False
