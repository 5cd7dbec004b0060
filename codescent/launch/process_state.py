"""In: the id of a process. Out: whether it runs, sleeps, waits for a disk, is stopped or frozen; its processor time.
Does not say what that means for a run (verdict.py does). Where /proc cannot tell, nothing is known."""

from __future__ import annotations

import os
from contextlib import suppress
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


def queued_s(pid: int) -> float:
    """Seconds that all threads of a process have waited for a processor so far; 0: the kernel does not count it."""
    with suppress(OSError):  # it has ended
        counts = [_text(thread / "schedstat").split() for thread in (proc.PROC / str(pid) / "task").iterdir()]
        return sum(int(one[1]) for one in counts if one) / 1e9
    return 0.0


def halted_by(pid: int) -> str:
    """Why a process cannot run: "is stopped" (by a signal) or "is frozen" (by its cgroup); "" if it can run."""
    fields = proc.stat_of(pid)
    if not fields:  # the process has ended, or nothing is known of it
        return ""
    if fields[0] in ("T", "t"):
        return "is stopped (SIGCONT continues it)"
    return "is frozen (by its cgroup)" if _is_in_frozen_cgroup(pid) else ""


def _is_in_frozen_cgroup(pid: int) -> bool:
    for line in _text(proc.PROC / str(pid) / "cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and "frozen 1" in _text(CGROUPS / path.lstrip("/") / "cgroup.events"):
            return True
        if controllers == "freezer" and "FROZEN" in _text(CGROUPS / "freezer" / path.lstrip("/") / "freezer.state"):
            return True
    return False


def _text(path: Path) -> str:
    """What the kernel says; "": nothing."""
    try:
        return path.read_text()
    except OSError:
        return ""
