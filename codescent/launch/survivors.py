"""In: ranks of this host that have died; what is decided for it. Out: processes in their place, ranks called together.
Does not decide it (decider.py does, on host 0), does not end a process and does not forward signals (local.py does)."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from codescent.base.call import Call
from codescent.base.errors import UserError
from codescent.launch.endings import Endings
from codescent.launch.reports import HostReport, Orders, ProcessDeath
from codescent.launch.roles import ended_by
from codescent.launch.stacks import Stacks
from codescent.launch.supervisor import Supervisor, where_of

Process = subprocess.Popen[bytes]
Start = Callable[[int, str], Process]
"""Starts a process of a slot, with the value of SURVIVES."""

WAITING_PAGES = 64
"""Pages of processes that wait for a place, behind those of the ranks."""


class Deciding(Protocol):
    """Who decides: on this host, or on another one.

    Attributes:
        every_s: seconds between two reports, at most.
        port: where rank 0 serves the store; 0: it is on this host.
    """

    every_s: float
    port: int

    def exchange(self, report: HostReport) -> Orders:
        """Say what the processes of this host do. Returns what it does now."""

    def close(self) -> None:
        """The ranks of this host have ended."""


@dataclass(frozen=True)
class Called:
    """The ranks that a call has given to the processes of this host.

    Attributes:
        ranks: how many the run has on all hosts.
        processes: by rank.
        joining: ranks that the others let in at the end of a step.
    """

    ranks: int
    processes: Mapping[int, Process]
    joining: frozenset[int]


class Survivors:
    """The processes of this host in a run that goes on after losses. Each is known by the slot of its start.

    Args:
        wanted: the number of ranks of the run that the user wants.
        deciding: who decides.
        supervisor, stacks, endings: of this host.
        start: see Start.
        say: prints a sentence.
        log: the end of what a process has written.
    """

    def __init__(
        self,
        wanted: int,
        deciding: Deciding,
        supervisor: Supervisor,
        stacks: Stacks,
        endings: Endings,
        start: Start,
        say: Callable[[str], None],
        log: Callable[[Process], str],
    ) -> None:
        self._wanted, self._deciding, self._supervisor, self._stacks = wanted, deciding, supervisor, stacks
        self._endings, self._start, self._say, self._log = endings, start, say, log
        self._processes: dict[int, Process] = {}  # by slot
        self._pages: dict[int, int] = {}  # of processes that wait for a place, by slot
        self._ranks: dict[int, int] = {}  # the slot of each rank of this host
        self._deaths: dict[int, ProcessDeath] = {}  # by slot
        self._unanswered = 0  # deaths of ranks for which there was no new call yet
        self.orders = Orders()

    @property
    def waiting(self) -> list[Process]:
        """The processes without a rank that live."""
        placed = self._ranks.values()
        return [one for slot, one in self._processes.items() if slot not in placed and slot not in self._deaths]

    @property
    def every_s(self) -> float:
        """Seconds until `look` is to be called again, at most."""
        return self._deciding.every_s

    @property
    def is_needed(self) -> bool:
        """Whether this host takes part although none of its ranks runs."""
        return not (self.orders.over or self.orders.done) and (self._unanswered > 0 or not self._ranks)

    def look(self, lost: Mapping[int, int], *, ends: bool, failed: str = "", code: int = 0) -> Called | None:
        """Say what has happened, and do what is decided. Returns the ranks of this host, if they are others now.

        Args:
            lost: the return code of each rank that has died since the last look.
            ends: whether ranks of this host end, by themselves or on request.
            failed: why the run ends, if a rank has an error of its own; "": none has.
            code: the exit code that follows.
        """
        for rank, returned in lost.items():
            self._die(self._ranks[rank], returned, rank)
        self._unanswered += len(lost)
        for slot, process in self._processes.items():
            if slot in self._deaths or slot in self._ranks.values():
                continue
            if (ended := self._endings.code(process)) is not None:
                self._die(slot, ended)
        pages = [self._supervisor.pages.read(rank) for rank in self._ranks]
        orders = self._deciding.exchange(
            HostReport(
                deaths=tuple(self._deaths.values()),
                ready=tuple(slot for slot in self._pages if slot not in self._deaths and self._is_ready(slot)),
                ends=ends,
                step=max((page.step for page in pages if page.position and page.step is not None), default=None),
                progressed=any(page.took.steps for page in pages),
                number=self.orders.number,
                failed=failed,
                code=code,
            )
        )
        before, self.orders = self.orders, orders
        if orders.over:
            return None
        new = [slot for slot in orders.slots if slot not in self._processes and slot not in self._deaths]
        for slot in new:
            self._begin(slot, orders)
        return self._call(orders, before) if orders.number > before.number else self._as_wanted(new)

    def close(self) -> None:
        """The ranks of this host have ended."""
        self._deciding.close()

    def _die(self, slot: int, code: int, rank: int | None = None) -> None:
        """Write down a death. Why a process has ended by itself is in its log."""
        process = self._processes[slot]
        if code >= 0 and slot not in self._deaths:  # else host 0 had not heard of it, and has given it a rank
            self._say(self._log(process))
        self._stacks.release(slot)
        ending = ended_by(code) if code < 0 else f"{'has ' if rank is None else ''}ended with exit code {code}"
        where, step = "", None
        if rank is not None:
            page = self._supervisor.pages.read(rank)
            where, step = where_of(page), page.step
        self._deaths[slot] = ProcessDeath(slot, process.pid, code, ending, where, step)

    def _begin(self, slot: int, orders: Orders) -> None:
        """Start a rank, as the user wants it; or a process that waits for a place, or has been given one already."""
        try:
            self._processes[slot] = self._start(slot, self._survives(slot, orders))
        except (UserError, OSError) as error:
            if slot < self._wanted:  # the first start: the command, or the machine, is not what the user thinks
                raise
            self._say(f"codescent: no process is started in place of one that has died: {error}")
            self._deaths[slot] = ProcessDeath(slot, 0, 1, "could not be started")

    def _survives(self, slot: int, orders: Orders) -> str:
        """The value of SURVIVES for a process that is started now."""
        if slot < self._wanted:
            return "0"
        number = orders.number if slot in orders.ranks else orders.number + 1
        page = self._pages[slot] = self._free_page()
        self._supervisor.pages.clear(page)
        return f"{number} {page}"

    def _free_page(self) -> int:
        """A page of no process that waits or imports. Raises UserError: there are too many."""
        placed = self._ranks.values()
        taken = {
            page
            for slot, page in self._pages.items()
            if slot not in self._deaths and not (slot in placed and self._is_ready(slot))
        }
        for page in range(self._wanted, self._wanted + WAITING_PAGES):
            if page not in taken:
                return page
        raise UserError(f"{WAITING_PAGES} processes wait for a place on this machine: more is not possible")

    def _as_wanted(self, new: Sequence[int]) -> Called | None:
        """The ranks of this host, if they were started just now, and none of them has another number."""
        if not any(slot < self._wanted for slot in new):
            return None
        self._ranks = {slot: slot for slot in new if slot < self._wanted and slot in self._processes}
        return Called(self._wanted, {rank: self._processes[rank] for rank in self._ranks}, frozenset())

    def _call(self, orders: Orders, before: Orders) -> Called:
        """Give each process its place, and tell all of them. This host may have missed calls since `before`."""
        is_urgent, pages = orders.urgent > before.number, self._supervisor.pages
        for rank in range(self._wanted) if is_urgent else ():
            pages.clear(rank)
        took_part = {*self._ranks.values()}
        own = {rank: slot for rank, slot in enumerate(orders.ranks) if slot in self._processes}
        joining = frozenset(rank for rank, slot in own.items() if not (is_urgent or slot in took_part))
        self._ranks, self._unanswered = own, 0
        self._stacks.renumber(own)
        self._supervisor.begin_anew(len(orders.ranks))
        places = {self._processes[slot].pid: rank for rank, slot in own.items()}
        pages.call = Call(orders.number, places, orders.values, orders.urgent, len(orders.ranks), orders.notes)
        return Called(len(orders.ranks), {rank: self._processes[slot] for rank, slot in own.items()}, joining)

    def _is_ready(self, slot: int) -> bool:
        """Whether a process that waits has imported what a rank needs."""
        return self._supervisor.pages.read(self._pages[slot]).beat_s > 0
