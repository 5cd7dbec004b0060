"""In: the id of a process. Out: whether it runs, sleeps, waits for a disk, is stopped or frozen; its processor time.
Does not say what that means for a run (verdict.py does). Where /proc cannot tell, nothing is known."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from codescent.base import proc

CGROUPS = Path("/sys/fs/cgroup")
_WORDS = {"R": "running", "S": "sleeping", "D": "disk wait", "T": "stopped", "t": "stopped", "Z": "gone", "X": "gone"}


@dataclass(frozen=True)
class ProcessState:
    """A moment of a process.

    Attributes:
        word: running, sleeping, disk wait, stopped, frozen, gone; "": unknown.
        cpu_s: processor seconds of all its threads so far.
    """

    word: str = ""
    cpu_s: float = 0.0


def state_of(pid: int) -> ProcessState:
    """The state of a process. Its main thread counts; "gone": there is no such process."""
    fields = proc.stat_of(pid)
    if not fields:
        return ProcessState("" if fields is None else "gone")
    word = "frozen" if _is_in_frozen_cgroup(pid) else _WORDS.get(fields[0], "sleeping")
    return ProcessState(word, (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"))


def halted_by(pid: int) -> str:
    """Why a process cannot run: "is stopped" (by a signal) or "is frozen" (by its cgroup); "" if it can run."""
    fields = proc.stat_of(pid)
    if not fields:  # the process has ended, or nothing is known of it
        return ""
    if fields[0] in ("T", "t"):
        return "is stopped (SIGCONT continues it)"
    return "is frozen (by its cgroup)" if _is_in_frozen_cgroup(pid) else ""


def _is_in_frozen_cgroup(pid: int) -> bool:
    try:
        lines = (proc.PROC / str(pid) / "cgroup").read_text().splitlines()
    except OSError:
        return False
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0" and _is_frozen(CGROUPS / path.lstrip("/") / "cgroup.events", "frozen 1"):
            return True
        if controllers == "freezer" and _is_frozen(CGROUPS / "freezer" / path.lstrip("/") / "freezer.state", "FROZEN"):
            return True
    return False


def _is_frozen(path: Path, word: str) -> bool:
    try:
        return word in path.read_text()
    except OSError:
        return False
