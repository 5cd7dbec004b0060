"""In: the mark of a run. Out: processes of this user and machine that have it in their environment, ended on request.
Does not look for names of programs. Runs on other hosts by ssh, as `python3 -P -m codescent.jobs.leftovers MARK`."""

from __future__ import annotations

import argparse
import os
import select
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from codescent.base.counted import counted
from codescent.base.visible import visible

MARK = "CODESCENT_MARK"
"""Variable that marks the processes of a run: its value is `mark_of` the run."""
PROC = Path("/proc")
STOP_S = 10.0
"""Seconds between SIGTERM and SIGKILL: ranks save meanwhile."""
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
    begin, found = f"{MARK}=".encode(), list[tuple[Left, str]]()
    for pid in sorted(_pids()):
        words = (word for word in _environment(pid) if word.startswith(begin))
        if (word := next(words, None)) is not None:
            found.append((Left(pid, command_of(pid)), os.fsdecode(word.removeprefix(begin))))
    return found


def end(mark: str, found: Sequence[Left]) -> int:
    """Send SIGTERM to the processes, and SIGKILL to those that live STOP_S later. Returns how many were killed.

    A process id may belong to another process by now: each process is opened, looked at again, and then signalled.
    """
    wanted = f"{MARK}={mark}".encode()
    with ExitStack() as stack:
        living: list[int] = []
        for left in found:
            with suppress(OSError):
                descriptor = os.pidfd_open(left.pid)
                stack.callback(os.close, descriptor)
                if has(left.pid, wanted):
                    signal.pidfd_send_signal(descriptor, signal.SIGTERM)
                    living.append(descriptor)
        end_s = time.monotonic() + STOP_S
        while living and (left_s := end_s - time.monotonic()) > 0:
            ended = select.select(living, [], [], left_s)[0]
            living = [one for one in living if one not in ended]
        for descriptor in living:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        return len(living)


def _pids() -> Iterator[int]:
    yield from (int(one.name) for one in PROC.iterdir() if one.name.isdigit())


def above(pid: int) -> list[int]:
    """A process and those above it."""
    found: list[int] = []
    while pid > 0:
        found.append(pid)
        try:
            pid = int((PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            break
    return found


def has(pid: int, wanted: bytes) -> bool:
    """Whether a process has this variable with this value: NAME=VALUE."""
    return wanted in _environment(pid)


def _environment(pid: int) -> list[bytes]:
    """The variables of a process; none: it has ended, or is another user's."""
    try:
        return (PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return []


def command_of(pid: int | str) -> str:
    """The begin of the command line of a process; "": it has ended, or is not seen here."""
    try:
        words = (PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""
    return visible(words[:SHOWN_CHARS])


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
