"""In: what each host reports of its processes. Out: who takes which rank, which processes are started, when a run ends.
Starts and ends no process (survivors.py does, on each host) and sends nothing (hosts.py does)."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from codescent.base.errors import RunFailed
from codescent.launch.places import LossPolicy, Places
from codescent.launch.reports import HostPlace, HostReport, Orders, ProcessDeath

TOGETHER_S = 5.0
"""Seconds in which processes that were started together join together: each growth costs the others a meeting."""
HOLD_S = 10.0
"""After a loss, seconds in which no process is started that nobody waits for. Importing torch would take a processor
that the others need to meet anew. Their first step ends it, too."""
LOOK_EVERY_S = 1.0
"""Seconds between two reports where all ranks are on this host: a death wakes it earlier."""

Record = Callable[[int, ProcessDeath, str], None]
"""Writes a crash into the run folder: of a rank, how it died, on which host."""


@dataclass
class _Host:
    """A host of the run.

    Attributes:
        place: what it has brought.
        report: what it has said last.
        is_lost: it has gone, with all its processes.
        idle_deaths: of processes that waited for a place.
    """

    place: HostPlace
    report: HostReport = field(default_factory=HostReport)
    is_lost: bool = False
    idle_deaths: int = 0

    @property
    def name(self) -> str:
        """Of the machine."""
        return self.place.name


class Decider:
    """Decides for all hosts of a run. It is on host 0, whose first rank is rank 0.

    Args:
        wanted: the number of ranks that the user wants.
        policy: what the run does about losses. Its spares are those of host 0.
        count: of these ranks, those of host 0.
        name: of host 0.
        say: prints a sentence.
        record: see Record.
        clock: time.monotonic, except in tests.
    """

    def __init__(
        self,
        wanted: int,
        policy: LossPolicy,
        count: int,
        name: str,
        say: Callable[[str], None],
        record: Record,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.places, self._policy = Places(wanted, policy), policy
        self._say, self._record, self._clock = say, record, clock
        self._hosts = {0: _Host(HostPlace(name, count, policy.spares))}
        for slot in range(count, wanted):  # nobody knows yet which hosts they have
            self.places.settle([slot], slot)
        self._known: set[int] = set()  # slots whose death has been handled
        self._ready_s: float | None = None  # since when a process is ready to join
        self._lost_s = -math.inf  # when ranks were lost last
        self._over, self._code, self._done = "", 0, False

    def hear(self, host: int, report: HostReport) -> None:
        """A host has said what its processes do."""
        if not self._hosts[host].is_lost:
            self._hosts[host].report = report

    def join(self, host: int, place: HostPlace) -> None:
        """A host has come; or again, with new processes. `host`: its first rank."""
        if (before := self._hosts.get(host)) is None:
            self.places.settle(range(host, host + place.count), host)
        else:
            self.lose(host, "its agent was started again")
            self.look()
            self._say(f"codescent: {before.name} is there again")
        self._hosts[host] = _Host(place)

    def lose(self, host: int, why: str) -> None:
        """A host has gone, and with it its processes. One whose ranks have ended is not lost."""
        gone = self._hosts[host]
        has_ended = gone.report.ends and any(slot in self.places.ranks for slot in self._slots_of(host))
        if gone.is_lost or has_ended or self._over or self._done:
            return
        gone.is_lost = True
        known = {death.slot for death in gone.report.deaths}
        deaths = [ProcessDeath(slot, 0, RunFailed.exit_code, f"is lost with its host: {why}")
                  for slot in self._slots_of(host) if slot not in known]  # fmt: skip
        gone.report = replace(gone.report, deaths=(*gone.report.deaths, *deaths), ready=(), ends=False)
        self._say(f"codescent: {gone.name} is lost: {why}")

    def name(self, host: int) -> str:
        """Of the machine."""
        return self._hosts[host].name

    def is_lost(self, host: int) -> bool:
        """Whether a host has gone."""
        return host in self._hosts and self._hosts[host].is_lost

    def finish(self) -> None:
        """The ranks of host 0 have ended."""
        self._done = not self._over

    def look(self) -> None:
        """Decide anew, by all that is reported."""
        hosts = self._hosts.values()
        self.places.became_ready(slot for host in hosts for slot in host.report.ready if slot in self.places.waiting)
        lost = self._lost()
        failed = next((host.report for host in hosts if host.report.failed), None)
        if failed is not None:
            return self._end(failed.failed, failed.code)
        if self._over:
            return None
        ends = any(host.report.ends for host in hosts)
        now = [host.report for host in hosts if host.report.number == self.places.number]  # others are older
        progressed = any(report.progressed for report in now)
        if not lost:
            if progressed or self._clock() - self._lost_s > HOLD_S:
                self._fill_up()
            if not ends and self._may_grow() and self.places.grows():
                self._say_notes()
            return None
        for rank, (host, death) in lost.items():
            process = f"pid {death.pid} on {host.name}" if death.pid else f"on {host.name}"
            who = f"codescent: rank {rank} of {len(self.places.ranks)} ({process})"
            self._say(f"{who} {death.ending} {death.where}".rstrip())
            self._record(rank, death, host.name)
        first = next(death for _, death in lost.values())
        code = (first.code or RunFailed.exit_code) if first.code >= 0 else 128 - first.code
        if ends:
            return self._end("the run ends: ranks were lost while others ended", code)
        step = max((report.step for report in now if report.step is not None), default=None)
        if why := self._policy.losses.add(self._clock(), step=step, progressed=progressed):
            return self._end(f"the run ends: {why}", code)
        self._lost_s = self._clock()
        if not self.places.after_loss(lost):
            self._fill_up(after_loss=True)
            if not self.places.after_loss(lost):
                return self._end(f"the run ends: {self._why_too_few()}", code)
        self._say_notes()
        ranks, wanted = len(self.places.ranks), self.places.wanted
        self._say(f"codescent: start {self._policy.losses.count + 1}, with {ranks} of {wanted} ranks")
        return None

    def orders(self, hosts: Iterable[int]) -> dict[int, Orders]:
        """What each of these hosts does now."""
        places, slots = self.places, self._slots()
        common = Orders(
            number=places.number,
            ranks=tuple(places.ranks),
            values=places.layout.values,
            notes=places.layout.notes,
            urgent=places.urgent,
            over=self._over,
            code=self._code,
            ends=any(one.report.ends for one in self._hosts.values()),
            done=self._done,
        )
        return {host: replace(common, slots=tuple(slots[host])) for host in hosts}

    def _lost(self) -> dict[int, tuple[_Host, ProcessDeath]]:
        """The ranks that have died since the last look. Deaths of processes that wait for a place are handled here."""
        found = {}
        for host in self._hosts.values():
            for death in host.report.deaths:
                if death.slot in self._known:
                    continue
                self._known.add(death.slot)
                if death.slot in self.places.ranks:
                    found[self.places.ranks.index(death.slot)] = host, death
                    continue
                self.places.forget(death.slot)
                host.idle_deaths += 1
                if not host.is_lost:
                    self._say(f"codescent: pid {death.pid}, which waited for a place, {death.ending}")
        return dict(sorted(found.items()))

    def _may_grow(self) -> bool:
        """Whether processes that are ready join now: those that were started with them are ready, too, or too late."""
        if not self.places.ready:
            self._ready_s = None
            return False
        self._ready_s = self._ready_s or self._clock()
        return not self.places.waiting or self._clock() - self._ready_s > TOGETHER_S

    def _fill_up(self, *, after_loss: bool = False) -> None:
        """Have processes started where a host has fewer than it should. Those that die as they wait are replaced only
        as often as ranks may be lost."""
        slots = self._slots()
        for number, host in self._hosts.items():
            if host.is_lost or not (after_loss or host.idle_deaths <= self._policy.losses.most):
                continue
            size = host.place.count + host.place.spares
            missing = size - len([slot for slot in slots[number] if slot not in self._known])
            self.places.new_slots(missing, number)

    def _slots(self) -> defaultdict[int, list[int]]:
        """The processes that each host has to have."""
        places, found = self.places, defaultdict[int, list[int]](list)
        for slot in dict.fromkeys((*places.ranks, *places.waiting, *places.ready)):
            found[places.host_of(slot)].append(slot)
        return found

    def _slots_of(self, host: int) -> list[int]:
        """The processes that a host has to have."""
        return self._slots()[host]

    def _why_too_few(self) -> str:
        """Why there are not enough processes."""
        gone = ", ".join(host.name for host in self._hosts.values() if host.is_lost)
        if not gone:
            return "no process can be started"
        places, known = self.places, self._known
        left = len([slot for slot in (*places.ranks, *places.waiting, *places.ready) if slot not in known])
        if self._policy.fewer is not None:
            return f"{gone} is lost, and no layout of at most {left} ranks goes on with the losses of the run"
        return (
            f"{gone} is lost, and {left} processes are left for {places.wanted} ranks; more survive.spares on other "
            'hosts, or survive.on_loss = "shrink", would go on'
        )

    def _say_notes(self) -> None:
        for note in self.places.layout.notes:
            self._say(f"codescent: {note}")

    def _end(self, why: str, code: int) -> None:
        if not self._over:
            self._over, self._code = why, code


class AloneDecider:
    """The decider of a run whose ranks are all on this host."""

    every_s, port = LOOK_EVERY_S, 0

    def __init__(self, decider: Decider) -> None:
        self._decider = decider

    def exchange(self, report: HostReport) -> Orders:
        """Say what the processes of this host do. Returns what it does now."""
        self._decider.hear(0, report)
        self._decider.look()
        return self._decider.orders([0])[0]

    def close(self) -> None:
        """The run is over."""
