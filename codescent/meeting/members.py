"""In: processes that say that they are ranks of a run, each with a fresh number. Out: which of them are its ranks.
Does not send or receive (store_server.py does), and compares only numbers of ranks (compared.py compares the rest).

A launcher may start ranks again while ranks of an earlier start still run, or while a store still has what they wrote.
torchrun's counts of starts differ between machines. So no count says who belongs together: the ranks are those
processes that are there at the same time, one for each rank, and that have all agreed to the same list."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

SILENT_S = 3.0
"""A process that has not asked for so long does not count until it asks again: it stands still, or is cut off."""
DISPUTE_S = 5.0
"""So long two processes may both say that they are one rank: the one of an earlier start ends meanwhile."""
LOOK_S = 0.2
"""Seconds between two looks at who is silent."""
SHOWN = 8
"""Largest number of ranks that a message names one by one."""


@dataclass
class _Applicant:
    """A process that asks to be a rank."""

    rank: int
    ranks: int
    host: str
    pid: int
    peer: object
    heard_s: float
    agrees: int = 0  # the last list to which it has agreed

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}"


class Members:
    """Rank 0's view of who is there. One thread calls it.

    Args:
        ranks: how many ranks the run has.
        limit_s: seconds from now until rank 0 gives up.
        clock: time.monotonic, except in tests.
        meets_anew: a rank that is lost, or loses others, meets all of them anew: nobody goes on without it.
        call: the number of the launcher's call by which rank 0 has its rank. Who follows another one has another number
            of ranks, or is on a host that was taken for lost.
    """

    def __init__(
        self,
        ranks: int,
        limit_s: float,
        clock: Callable[[], float] = time.monotonic,
        *,
        meets_anew: bool = False,
        call: int = 0,
    ) -> None:
        self._call = call
        self._ranks, self._limit_s, self._clock, self._meets_anew = ranks, limit_s, clock, meets_anew
        self._end_s = clock() + limit_s
        self._asking: dict[str, _Applicant] = {}  # by fresh number
        self._list = 0  # number of the list that the processes are asked to agree to; 0: there is none
        self._lists = itertools.count(1)
        self._disputes: list[str] = []
        self._disputed_s = math.inf  # since when
        self._looked_s = -math.inf
        self._absent = list(range(ranks))
        self._gone: dict[int, _Applicant] = {}  # by rank: who asked, and asks no more
        self._failed: dict[int, tuple[str, float]] = {}  # by rank: who, and when; perhaps of an earlier start
        self._met: frozenset[str] = frozenset()
        self._problems: list[str] = []
        self._told: set[str] = set()  # who has heard of the problems

    def ask(self, peer: object, head: Mapping[str, Any]) -> dict[str, Any]:
        """Answer a process that asks. It asks again until the answer has "met", "refused" or "problems"."""
        number = str(head["number"])
        if self._met:
            return self._answer_late(number, bool(head.get("late")))
        if int(head.get("call", 0)) != self._call:
            return {"refused": f"rank 0 follows call {self._call} of its launcher"}
        if "failed" in head:
            who = f"rank {head['rank']} (pid {head['pid']} on {head['host']})"
            self._failed[int(head["rank"])] = who, self._clock()
            return {}
        self._note(peer, number, head)
        self._look()
        if self._problems:
            self._told.add(number)
            return {"problems": self._problems}
        if self._all_agree():
            self._met = frozenset(self._asking)
            return {"met": True}
        return {"list": self._list, "missing": self._absent[:SHOWN], "came": len(self._asking)}

    def left(self, peer: object, why: str) -> bool:
        """A connection has ended, and with it the process that asked on it. Returns whether all others must hear of it,
        because they may wait for it at the store."""
        gone = [number for number, one in self._asking.items() if one.peer is peer]
        if self._met:
            return self._meets_anew and bool(gone)
        for number in gone:
            self._forget(number)
        return False

    def all_told(self) -> bool:
        """Whether everyone who asks has heard of the problems."""
        return self._told >= set(self._asking)

    def _answer_late(self, number: str, late: bool) -> dict[str, Any]:
        """The ranks have met. `late`: our launcher has started this process for one of them that has died."""
        if number in self._met or late:
            return {"met": True}
        return {"refused": "the ranks of this start have met without it"}

    def _all_agree(self) -> bool:
        return self._list > 0 and all(one.agrees == self._list for one in self._asking.values())

    def _note(self, peer: object, number: str, head: Mapping[str, Any]) -> None:
        now_s = self._clock()
        one = self._asking.get(number)
        if one is None:
            one = _Applicant(int(head["rank"]), int(head["ranks"]), str(head["host"]), int(head["pid"]), peer, now_s)
            self._asking[number] = one
            self._gone.pop(one.rank, None)
            self._changed()
        one.peer, one.heard_s, one.agrees = peer, now_s, int(head["agrees"])

    def _look(self) -> None:
        """Find what has changed by time alone: silent processes, disputes that stay, the end of the wait."""
        now_s = self._clock()
        if now_s - self._looked_s < LOOK_S:
            return
        self._looked_s = now_s
        for number in [number for number, one in self._asking.items() if now_s - one.heard_s > SILENT_S]:
            self._forget(number)
        if self._disputes and now_s - self._disputed_s > DISPUTE_S:
            self._problems = self._problems or self._disputes
        elif now_s > self._end_s and not self._all_agree():
            self._problems = self._problems or self._disputes or [self._missing()]
        for rank, (who, since_s) in self._failed.items():
            if rank in self._absent and now_s - since_s > SILENT_S:
                self._problems = self._problems or [f"{who} failed before the ranks met: see its message"]

    def _forget(self, number: str) -> None:
        one = self._asking.pop(number)
        self._gone[one.rank] = one
        self._changed()

    def _changed(self) -> None:
        """Others are there than before. Who has agreed to an earlier list agrees anew."""
        here = {one.rank for one in self._asking.values()}
        self._absent = [rank for rank in range(self._ranks) if rank not in here]
        self._disputes = [*self._doubles(), *self._other_sizes()]
        self._disputed_s = min(self._disputed_s, self._clock()) if self._disputes else math.inf
        self._list = next(self._lists) if not (self._absent or self._disputes) else 0

    def _doubles(self) -> list[str]:
        by_rank: dict[int, list[_Applicant]] = {}
        for one in self._asking.values():
            by_rank.setdefault(one.rank, []).append(one)
        return [
            f"{len(several)} processes say that they are rank {rank} of {self._ranks}: {', '.join(map(str, several))}: "
            "give each process another RANK, and each job a MASTER_PORT of its own"
            for rank, several in by_rank.items()
            if len(several) > 1
        ]

    def _other_sizes(self) -> list[str]:
        others = [one for one in self._asking.values() if one.ranks != self._ranks or not 0 <= one.rank < self._ranks]
        return [
            f"rank 0 was started as one of {self._ranks} ranks, but rank {one.rank} ({one}) as one of {one.ranks}: "
            "start every rank with the same number of ranks (WORLD_SIZE), and each job with a MASTER_PORT of its own"
            for one in others[:SHOWN]
        ]

    def _missing(self) -> str:
        absent, here = self._absent, sorted(self._asking.values(), key=lambda one: one.rank)
        known = [self._gone[rank] for rank in absent if rank in self._gone]
        left = "".join(f"; rank {one.rank} ({one}) came and left: see its error message" for one in known[:SHOWN])
        came = listed([f"{one.rank} (on {one.host})" for one in here])
        if not absent:
            slow = listed([f"{one.rank} ({one})" for one in here if one.agrees != self._list])
            return f"all ranks came within {self._limit_s:g} s (parallel.meet_s), but {slow} did not answer any more"
        return (
            f"not all ranks came within {self._limit_s:g} s (parallel.meet_s): missing {listed(absent)} of "
            f"{self._ranks}; came: {came}{left}. Either a missing rank has ended (see its error message), or it cannot "
            "reach rank 0: set MASTER_ADDR, for every rank"
        )


def listed(ranks: Collection[object]) -> str:
    """Ranks in a sentence, such as "rank 1" or "ranks 1, 2 and 14 more"."""
    shown = ", ".join(map(str, list(ranks)[:SHOWN])) + (f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else "")
    return f"rank{'s' if len(ranks) != 1 else ''} {shown}"
