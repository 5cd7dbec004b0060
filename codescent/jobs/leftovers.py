"""In: the mark of a run. Out: processes of this user and machine that have it in their environment, ended on request.
Does not look for names of programs. Runs on other hosts by ssh, as `python3 -P -m codescent.jobs.leftovers MARK`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from codescent.base.counted import counted
from codescent.base.visible import visible

MARK = "CODESCENT_MARK"
"""Variable that marks the processes of a run: its value is `mark_of` the run."""
STOP_S = 10.0
"""Seconds between SIGTERM and SIGKILL: ranks save meanwhile."""
POLL_S = 0.02
SHOWN_CHARS = 60


@dataclass(frozen=True)
class Left:
    """A process of the run: its id and the begin of its command line."""

    pid: int
    command: str


def mark_of(run: Path) -> str:
    """What marks the processes of a run: its folder without links and "..": each name of it is one mark."""
    return os.path.realpath(run)


def find(mark: str) -> list[Left]:
    """This user's processes with the mark, without this process and those above it."""
    own = above(os.getpid())
    return [left for left, its in marked() if its == mark and left.pid not in own]


def marked() -> list[tuple[Left, str]]:
    """This user's processes with any mark, and the mark of each."""
    found = ((process.pid, variables_of(process).get(MARK)) for process in psutil.process_iter())
    return [(Left(pid, command_of(pid)), mark) for pid, mark in found if mark is not None]


def end(mark: str, found: Sequence[Left]) -> int:
    """Send SIGTERM to the processes, and SIGKILL to those that live STOP_S later. Returns how many were killed.

    A process id may belong to another process by now: each process is looked at again, and psutil signals none that
    began later.
    """
    living: list[psutil.Process] = []
    for left in found:
        with suppress(psutil.Error):
            process = psutil.Process(left.pid)
            if variables_of(process).get(MARK) == mark:
                process.terminate()
                living.append(process)
    end_s = time.monotonic() + STOP_S
    while (living := [one for one in living if _lives(one)]) and time.monotonic() < end_s:
        time.sleep(POLL_S)
    for process in living:
        with suppress(psutil.Error):
            process.kill()
    return len(living)


def above(pid: int) -> list[int]:
    """A process and those above it."""
    try:
        return [pid, *(process.pid for process in psutil.Process(pid).parents())]
    except psutil.Error:
        return [pid]


def variables_of(process: psutil.Process) -> dict[str, str]:
    """The variables of a process; none: it has ended, or is another user's."""
    try:
        variables: dict[str, str] = process.environ()
    except (psutil.Error, OSError):
        return {}
    return variables


def command_of(pid: int) -> str:
    """The begin of the command line of a process; "": it has ended, or is not seen here."""
    try:
        words = " ".join(psutil.Process(pid).cmdline())
    except (psutil.Error, OSError):
        return ""
    return visible(words.strip()[:SHOWN_CHARS])


def _lives(process: psutil.Process) -> bool:
    """Whether it has not ended. A process that its parent has not awaited has ended."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def main(words: Sequence[str] | None = None) -> int:
    """Print the processes of a mark; end them with --end. Returns 0 if none is left, 1 if some are."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="codescent.jobs.leftovers", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("mark", help="the run's absolute folder, without links")
    parser.add_argument("--end", action="store_true", help="end them: SIGTERM, and SIGKILL 10 seconds later")
    asked = parser.parse_args(words)
    found = find(asked.mark)
    for left in found:
        print(f"{os.uname().nodename}: process {left.pid}: {left.command}")
    if asked.end and found:
        killed = end(asked.mark, found)
        print(
            f"{os.uname().nodename}: {counted(len(found), 'process')} ended" + (f", {killed} by SIGKILL" * (killed > 0))
        )
        found = find(asked.mark)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
