"""In: deaths of workers as the launcher or the first server has seen them, workers that come again. Out: who is there.
Does not see a death (launch/local.py and failure_detector.py do) and makes no process groups (regroup.py does)."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from codescent.base.progress import Pages


@dataclass(frozen=True)
class Death:
    """When a rank died, by time.monotonic of who saw it, and the steps that it had done.

    `host`: its machine; "": this one, whose launcher has seen the death.
    """

    moment_s: float
    position: float
    host: str = ""


@dataclass(frozen=True)
class LostWorker:
    """A worker without which the run goes on.

    Attributes:
        rank: of the worker.
        host: its machine.
        step: in which it died (from 1).
        noticed_s: seconds from its death, or from the loss of its connection, until it counted as dead.
    """

    rank: int
    host: str
    step: int
    noticed_s: float

    @classmethod
    def of(cls, rank: int, death: Death) -> LostWorker:
        """The launcher sees only processes of this machine."""
        noticed_s = round(time.monotonic() - death.moment_s, 3)
        return cls(rank, death.host or socket.gethostname(), int(death.position) + 1, noticed_s)


@dataclass(frozen=True)
class RejoinedWorker:
    """A worker that was started again, and trains from now on.

    Attributes:
        rank: of the worker.
        host: its machine.
        step: the first one that was not complete when it came (from 1).
        absent_s: seconds from the death of its predecessor until then.
    """

    rank: int
    host: str
    step: int
    absent_s: float


@dataclass(frozen=True)
class MembershipChange:
    """Who has died, and who has come, since the ranks met before. A worker may be in both.

    Attributes:
        lost: those that have died.
        joined: those that have come.
        replaces: this generation ends here: process groups and trainers are made anew, from a checkpoint. A coupling
            that says so needs the result of this step (`Coupling.needs_result`), or a device is a step further.
    """

    lost: tuple[LostWorker, ...] = ()
    joined: tuple[RejoinedWorker, ...] = ()
    replaces: bool = False


class Membership:
    """Which workers are there, as the first server knows it. The caller locks."""

    def __init__(self) -> None:
        self.deaths: Callable[[], dict[int, Death]] = dict
        """The last death of each worker that is dead now."""
        self.absent: set[int] = set()
        self._moments: dict[int, float] = {}  # of the last death of each worker
        self._lost: list[LostWorker] = []
        self._joined: list[RejoinedWorker] = []

    def new_deaths(self) -> list[int]:
        """The workers that have died since the last call."""
        return [worker for worker, death in self.deaths().items() if self.died(worker, death)]

    def died(self, worker: int, death: Death) -> bool:
        """Count a death. Returns False if it is known."""
        if self._moments.get(worker) == death.moment_s:
            return False
        self._moments[worker] = death.moment_s
        self.absent.add(worker)
        self._lost.append(LostWorker.of(worker, death))
        return True

    def comes(self, worker: int, done: int) -> None:
        """A worker that had died is there again, after `done` complete steps. It may say so again."""
        if worker in self.absent:
            self.absent.discard(worker)
            absent_s = round(time.monotonic() - self._moments[worker], 3)
            self._joined.append(RejoinedWorker(worker, socket.gethostname(), done + 1, absent_s))

    def take(self) -> tuple[list[LostWorker], list[RejoinedWorker]]:
        """Who has died, and who has come, since the last call."""
        found = self._lost, self._joined
        self._lost, self._joined = [], []
        return found


def deaths(pages: Pages, workers: int) -> dict[int, Death]:
    """The workers that are dead now, as the launcher has seen it."""
    found = {rank: pages.read(rank) for rank in range(workers)}
    return {rank: Death(page.died_s, page.position) for rank, page in found.items() if page.died_s}
