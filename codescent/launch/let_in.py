"""In: a run that goes on with fewer ranks, and a step. Out: a process that waits takes part from that step on.
Does not decide who gets which rank (places.py does) and makes no fault (inject.py does)."""

from __future__ import annotations

import math
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

        None instead of both: the run is over, or no rank is missing.
        """
        if (call := self._until(step - 1)) is None:
            return None
        with _stopped(call.places):
            while not (waiting := self._ranks.waiting(call)):
                if self._over.wait(LOOK_EVERY_S):
                    return None
            pid, page = next(iter(waiting.items()))
            make_folder(self._invited / str(pid))
            latest_s = math.inf
            while self._pages.call.number == call.number and time.monotonic() < latest_s:
                if self._over.wait(LOOK_EVERY_S):
                    return None
                if latest_s == math.inf and self._pages.read(page).beat_s > 0:
                    latest_s = time.monotonic() + CALLS_WITHIN_S
        return pid, self._pages.call.places.get(pid)

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
