"""In: the process that has started the ranks of a run here. Out: their processes and pages, seen from outside.
Sends no signal (inject.py and let_in.py do). Linux alone: it reads /proc."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

from codescent.base.call import SURVIVES, Call
from codescent.base.progress import PROGRESS_FD, Pages
from codescent.base.stacks import borrowed


class _Child(NamedTuple):
    """A process that the launcher has started, and that lives.

    `rank`: with which it was started. `pages`: descriptor of the pages. `waits_at`: its page, if it was started to wait
    for a place; "": it was not.
    """

    pid: int
    rank: int
    pages: int
    waits_at: str


class LocalRanks:
    """The ranks that a process of this machine has started, seen from another process.

    Args:
        launcher: id of that process.
        ranks: their number at the start.
    """

    def __init__(self, launcher: int, ranks: int) -> None:
        self.launcher, self.ranks = launcher, ranks

    def pid_of(self, rank: int, call: Call) -> int | None:
        """The process that is this rank since a call; None: there is none now."""
        if call.number:
            return next((pid for pid, number in call.places.items() if number == rank), None)
        return next((one.pid for one in self._children() if one.rank == rank and not one.waits_at), None)

    def waiting(self, call: Call) -> dict[int, int]:
        """The processes without a place in a call, with the page on which each says that it is ready. Oldest first."""
        found = [one for one in self._children() if one.waits_at and one.pid not in call.places]
        return {one.pid: int(one.waits_at) for one in sorted(found)}

    def pages(self) -> Pages | None:
        """What the ranks write; None: no rank has started yet, or this process may not read it."""
        for child in self._children():
            with contextlib.suppress(OSError, ValueError):
                inode = Path(f"/proc/{child.pid}/fd/{child.pages}").stat().st_ino
                if (found := borrowed(child.pid, child.pages, inode)) is None:
                    continue
                try:
                    return Pages.of({PROGRESS_FD: str(found)})
                finally:
                    os.close(found)
        return None

    def _children(self) -> Iterator[_Child]:
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self.launcher).children():
                with contextlib.suppress(psutil.Error, OSError):
                    names = child.environ()
                    rank, pages = names.get("RANK", ""), names.get(PROGRESS_FD, "")
                    _, _, waits_at = names.get(SURVIVES, "").partition(" ")
                    if rank.isdigit() and pages.isdigit() and child.status() != psutil.STATUS_ZOMBIE:
                        yield _Child(child.pid, int(rank), int(pages), waits_at)
