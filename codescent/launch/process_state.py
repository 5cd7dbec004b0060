"""In: the id of a process. Out: whether it runs, sleeps, waits for a disk, is stopped or frozen; its processor time.
Does not say what that means for a run (verdict.py does). Where there is no /proc, nothing is known."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

CGROUPS, PROC = Path("/sys/fs/cgroup"), Path("/proc")
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
    try:
        fields = _fields(pid)
    except OSError:
        return ProcessState("gone" if PROC.is_dir() else "")
    except IndexError:
        return ProcessState()
    word = "frozen" if _is_in_frozen_cgroup(pid) else _WORDS.get(fields[0], "sleeping")
    return ProcessState(word, (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"))


def halted_by(pid: int) -> str:
    """Why a process cannot run: "is stopped" (by a signal) or "is frozen" (by its cgroup); "" if it can run."""
    try:
        if _fields(pid)[0] in ("T", "t"):
            return "is stopped (SIGCONT continues it)"
    except (OSError, IndexError):  # the process has ended, or this system has no /proc
        return ""
    return "is frozen (by its cgroup)" if _is_in_frozen_cgroup(pid) else ""


def _fields(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name."""
    stat = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    return stat.rpartition(")")[2].split()


def _is_in_frozen_cgroup(pid: int) -> bool:
    try:
        lines = (PROC / str(pid) / "cgroup").read_text().splitlines()
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
