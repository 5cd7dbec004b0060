"""In: a run that goes on with fewer ranks, and a step. Out: a process that waits takes part from that step on.
Does not decide who gets which rank (places.py does) and makes no fault (inject.py does)."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from codescent.base.call import Call
from codescent.base.progress import ENDED, Pages
from codescent.base.writing import make_folder
from codescent.launch.local_ranks import LocalRanks

LOOK_EVERY_S = 0.001
"""A step of a small model takes some milliseconds."""
LOOK_FOR_PROCESSES_S = 0.05
STARTS_WITHIN_S = 120.0
"""Seconds in which a new process has imported torch, on a busy machine."""
CALLS_WITHIN_S = 5.0
"""Seconds in which the launcher gives a place to a process that is ready. It looks once in a second."""


class LetIn:
    """Lets processes take part in a run, one by one.

    A new process needs seconds to import torch, and a run may end before. So the ranks are stopped (SIGSTOP) in the
    step before, until the launcher has called it.

    Args:
        pages: of all ranks.
        ranks: of the run.
        invited: the folder of INVITED (base/call.py).
        over: is set when the run has ended.
    """

    def __init__(self, pages: Pages, ranks: LocalRanks, invited: Path, over: threading.Event) -> None:
        self._pages, self._ranks, self._invited, self._over = pages, ranks, invited, over

    def at(self, step: int) -> tuple[int, int | None] | None:
        """Let one process take part from a step on. Returns it, and its rank; None: no layout has a place for it.

        None instead of both: the run is over, no rank is missing, or no process has come.
        """
        if (call := self._until(step - 1)) is None:
            return None
        with _stopped(call.places):
            return self._invite(call)

    def _invite(self, call: Call) -> tuple[int, int | None] | None:
        """Invite the oldest process that waits, until there is another call. See `at`."""
        end_s, pid, page = time.monotonic() + STARTS_WITHIN_S, 0, 0
        while not self._over.wait(LOOK_FOR_PROCESSES_S) and time.monotonic() < end_s:
            if (now := self._pages.call).number != call.number:
                return pid, now.places.get(pid)
            if pid not in (waiting := self._ranks.waiting(call)):  # none was there, or it has died
                pid, page = next(iter(waiting.items()), (0, 0))
                if pid:
                    make_folder(self._invited / str(pid))
            elif self._pages.read(page).beat_s > 0:
                end_s = min(end_s, time.monotonic() + CALLS_WITHIN_S)
        return (pid, None) if pid and self._pages.read(page).beat_s > 0 and not self._over.is_set() else None

    def _until(self, step: int) -> Call | None:
        """Wait until the ranks that are left have begun a step. Returns their call; None: no rank is missing."""
        while not self._over.wait(LOOK_EVERY_S):
            position = self._pages.read(0).position
            if position == ENDED:
                return None
            if position > step - 1:
                call = self._pages.call
                if 0 < len(call.places) < self._ranks.ranks:
                    return call
        return None


@contextmanager
def _stopped(processes: Collection[int]) -> Iterator[None]:
    """A block in which these processes do nothing."""
    try:
        _send(processes, signal.SIGSTOP)
        yield
    finally:
        _send(processes, signal.SIGCONT)


def _send(processes: Collection[int], number: int) -> None:
    for pid in processes:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
