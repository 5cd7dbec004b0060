"""In: the name of a program. Out: which process above this one runs it.
Does not know other processes than those that this one descends from, and none where there is no /proc."""

from __future__ import annotations

import os
from pathlib import Path


def nearest(program: str) -> int | None:
    """Number of the nearest process above this one that runs `program`; None where there is none, or no /proc."""
    number = os.getppid()
    while number > 1:
        try:
            stat = Path(f"/proc/{number}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None
        name, _, rest = stat.partition("(")[2].rpartition(")")
        if name == program:
            return number
        number = int(rest.split()[1])
    return None
