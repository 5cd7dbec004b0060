"""In: the name of a program. Out: the nearest ancestor process that runs it.
Does not see processes other than ancestors, and needs /proc."""

from __future__ import annotations

import os
from pathlib import Path


def nearest(program: str) -> int | None:
    """Process id of the nearest ancestor that runs `program`; None if there is none, or no /proc."""
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
