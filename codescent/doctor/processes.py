"""In: the processes of the ranks of this host. Out: processes of other runs, on devices, and at a port.
Does not end a process (jobs/leftovers.py does, on request)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import psutil

from codescent.base.token import TOKEN
from codescent.doctor.device_tools import processes
from codescent.jobs.leftovers import MARK, above, command_of, marked, variables_of


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
    every = marked()
    own_marked = {left.pid for left, mark in every if mark == env_mark}
    own = {pid for rank in ranks for pid in above(rank)}
    launchers = own & own_marked
    found = []
    for left, mark in every:
        if token and mark == env_mark and _token_of(left.pid) == token:
            continue
        if left.pid not in own and not launchers.intersection(above(left.pid)):
            found.append({"pid": left.pid, "command": left.command, "mark": mark})
    return found


def _token_of(pid: int) -> str | None:
    """The run token of a process; None: it has none, or has ended."""
    try:
        return variables_of(psutil.Process(pid)).get(TOKEN)
    except psutil.Error:
        return None


def on_devices(ranks: Collection[int]) -> list[dict[str, str]]:
    """Processes with memory on a device that are none of the ranks."""
    others = (one for one in processes() if one["pid"] not in set(map(str, ranks)))
    return [{**one, "command": command_of(int(one["pid"])) if one["pid"].isdecimal() else ""} for one in others]


def listener(port: int) -> str:
    """Who listens at a port of this host, such as "process 17 (python3 ...)"; "": unknown, or another user's."""
    try:
        connections = psutil.net_connections("tcp")
    except psutil.Error:  # macOS answers the administrator alone
        return ""
    listens = (one for one in connections if one.status == psutil.CONN_LISTEN and one.laddr.port == port)
    pid = next((one.pid for one in listens if one.pid is not None), None)
    return "" if pid is None else f"process {pid} ({command_of(pid)})"
