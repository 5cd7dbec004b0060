"""In: this process. Out: the seconds since it was started.
Does not start a process (launch/ does)."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from codescent.base.reading import read_text

STAT = Path("/proc/self/stat")


def seconds_since_start() -> float | None:
    """Seconds since the system has made this process, in steps of 10 ms; None: this system does not say it.

    proc_pid_stat(5): field 22 is the time of the start after boot, in clock ticks.
    """
    if sys.platform != "linux":
        return None
    try:
        begun = int(read_text(STAT, errors="replace").rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return None
    return time.clock_gettime(time.CLOCK_BOOTTIME) - begun / os.sysconf("SC_CLK_TCK")
