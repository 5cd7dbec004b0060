"""In: the processes of the ranks of this host. Out: processes of other runs, on devices, and at a port.
Does not end a process (jobs/leftovers.py does, on request)."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from codescent.base.token import TOKEN
from codescent.doctor.device_tools import processes
from codescent.jobs.leftovers import MARK, PROC, above, command_of, has, marked

LISTENS = "0A"


def left_behind(ranks: Collection[int], env: Mapping[str, str]) -> list[dict[str, Any]]:
    """Processes with a mark of a run: "pid", "command", "mark". Those of the present ranks are left out.

    What hangs on a launcher with the mark of the ranks belongs to them. So does a process with their mark and their
    token: srun, for example, is above no rank, since the daemon of SLURM starts them. A script draws a new token for
    each start, so processes of an earlier one have another.

    Args:
        ranks: process ids of the ranks of this host.
        env: of one of them.
    """
    env_mark, token = env.get(MARK), env.get(TOKEN, "")
    same = os.fsencode(f"{TOKEN}={token}")
    every = marked()
    own_marked = {left.pid for left, mark in every if mark == env_mark}
    own = {pid for rank in ranks for pid in above(rank)}
    launchers = own & own_marked
    found = []
    for left, mark in every:
        if token and mark == env_mark and has(left.pid, same):
            continue
        if left.pid not in own and not launchers.intersection(above(left.pid)):
            found.append({"pid": left.pid, "command": left.command, "mark": mark})
    return found


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
