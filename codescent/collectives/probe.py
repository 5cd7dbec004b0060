"""In: a call of this rank, and the store of all ranks. Out: one line of whether it works, within a bounded time.
Does not know the calls (calls.py does) and starts no rank. A rank whose call hangs is ended."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from codescent.base.rank import Rank
from codescent.collectives.calls import Result
from codescent.collectives.task import HANGS, NO, WRONG, YES, Line, file_of
from codescent.meeting.compared import stay_until_read
from codescent.meeting.store import Store

HUNG = 2
"""Exit code of a rank that has written that its call hangs."""
GRACE_S = 10.0
"""After this many seconds more the kernel ends a rank whose threads cannot run."""
WHY_CHARS = 300
STACK = ("Exception raised from ", "frame #", "For more info", "NCCL_DEBUG")
"""Beginnings of the lines of a message of torch that say nothing of the cause."""


class WrongResult(Exception):
    """A collective gave other numbers than it should."""


class Probe:
    """Tries one thing after the other on this rank, together with all other ranks of its set.

    Args:
        folder: for the lines of the ranks.
        store: of the ranks. It carries the outcomes: the process group may be broken.
        this_rank: this process among the ranks.
        limit_s: seconds after which a call counts as hanging, and its rank is ended.
    """

    def __init__(self, folder: Path, store: Store, this_rank: Rank, limit_s: float) -> None:
        self.file, self.store, self.this_rank, self.limit_s = file_of(folder, this_rank.rank), store, this_rank, limit_s
        self.lock = threading.Lock()

    def __call__(self, name: str, act: Callable[[], Any]) -> Sequence[str]:
        """Call `act` on all ranks at the same time and write a line. Returns the states of all ranks. Collective."""
        self._together(f"{name} begins", "")
        begin_s = time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, self.limit_s + GRACE_S)  # not handled: the kernel ends the process
        watchdog = threading.Timer(self.limit_s, self._hangs, (name, begin_s))
        watchdog.daemon = True
        watchdog.start()
        found, state, why = None, YES, ""
        try:
            found = act()
        except WrongResult as error:
            state, why = WRONG, str(error)
        except Exception as error:  # whatever torch raises is the answer to the question
            state, why = NO, reason(error)
        with self.lock:  # the watchdog holds it to the end of the process
            watchdog.cancel()
            signal.setitimer(signal.ITIMER_REAL, 0)
            Line(name, state, why, time.monotonic() - begin_s, found).append(self.file)
        return self._together(f"{name} ends", state)

    def _hangs(self, name: str, begin_s: float) -> None:
        with self.lock:
            seconds = time.monotonic() - begin_s
            Line(name, HANGS, f"ended after {self.limit_s:g} s", seconds).append(self.file)
            os._exit(HUNG)

    def _together(self, key: str, mine: str) -> Sequence[str]:
        """Wait until all ranks have come here. Returns the text of each."""
        self.store.set(f"{key} {self.this_rank.rank}", json.dumps(mine))
        found = self.store.multi_get([f"{key} {rank}" for rank in range(self.this_rank.world_size)])
        stay_until_read(self.store, self.this_rank, key)
        return [json.loads(one) for one in found]


def check(results: Sequence[Result], name: str) -> None:
    """Raise WrongResult if a tensor that a collective gave is not the right one."""
    for found, right, rounding in results:
        if not torch.allclose(found.cpu().double(), right.cpu().double(), rtol=rounding, atol=0.0):
            raise WrongResult(f"{name} gave {found.tolist()}; right is {right.tolist()}")


def reason(error: Exception) -> str:
    """What torch says, in one line without its stack."""
    kept = []
    for line in str(error).splitlines():
        if line.startswith(STACK):
            break
        kept.append(line.strip())
    said = " ".join(filter(None, kept)) or type(error).__name__
    return said if len(said) <= WHY_CHARS else f"{said[: WHY_CHARS - 3]}..."
