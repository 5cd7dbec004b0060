"""In: the processes of the ranks of this host. Out: processes of other runs, on devices, and at a port.
Does not end a process (jobs/leftovers.py does, on request)."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from codescent.doctor.devices import processes
from codescent.jobs.leftovers import MARK, PROC, above, command_of, marked

LISTENS = "0A"


def left_behind(ranks: Collection[int], env_mark: str | None) -> list[dict[str, Any]]:
    """Processes with a mark of a run: "pid", "command", "mark". Those of the present ranks are left out.

    Args:
        ranks: process ids of the ranks of this host.
        env_mark: their own mark. What hangs on a launcher with this mark belongs to them.
    """
    every = marked()
    own_marked = {left.pid for left, mark in every if mark == env_mark}
    own = {pid for rank in ranks for pid in above(rank)}
    launchers = own & own_marked
    found = []
    for left, mark in every:
        if left.pid not in own and not launchers.intersection(above(left.pid)):
            found.append({"pid": left.pid, "command": left.command, "mark": mark})
    return found


def own_mark() -> str | None:
    """The mark of this process."""
    return os.environ.get(MARK)


def on_devices(ranks: Collection[int]) -> list[dict[str, str]]:
    """Processes with memory on a device that are none of the ranks."""
    return [
        {**one, "command": command_of(one["pid"])} for one in processes() if one["pid"] not in {str(r) for r in ranks}
    ]


def listener(port: int) -> str:
    """Who listens at a port of this host, such as "process 17 (python3 ...)"; "": unknown, or another user's."""
    inodes = set()
    for name in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/self/net/{name}").read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for fields in (line.split() for line in lines):
            if fields[3] == LISTENS and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    for process in PROC.iterdir() if inodes else ():
        if process.name.isdigit() and inodes.intersection(_open_files(process)):
            return f"process {process.name} ({command_of(process.name)})"
    return ""


def _open_files(process: Path) -> set[str]:
    try:
        return {str(one.readlink()) for one in (process / "fd").iterdir()}
    except OSError:  # it has ended, or is another user's
        return set()
