"""In: ranks that have died, spare processes that are ready. Out: who takes which rank from now on.
Does not start or end a process itself (local.py does) and does not build a plan (its caller hands in layouts)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from codescent.base.progress import Pages
from codescent.launch.losses import LossCount


@dataclass(frozen=True)
class FewerRanks:
    """How a run is divided among fewer ranks than the user wants.

    Attributes:
        ranks: how many.
        values: keys of the config that it changes.
        notes: what a user should know of it.
        parts: of weights and optimizer state, for each rank: ranks with the same number hold the same. Empty: unknown.
    """

    ranks: int
    values: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    parts: tuple[int, ...] = ()


Fewer = Callable[[int], FewerRanks | None]
"""The largest layout of at most so many ranks; None: there is none."""


@dataclass(frozen=True)
class LossPolicy:
    """What a run does about ranks that die.

    Attributes:
        losses: ends the run if they are too many.
        spares: processes that wait for a place.
        fewer: a run whose ranks are too few goes on with this layout; None: it waits for all of them.
        later: makes `fewer`, where only the ranks know the config, of the pages of this host.
    """

    losses: LossCount
    spares: int = 0
    fewer: Fewer | None = None
    later: Callable[[Pages], Fewer] | None = None


class Places:
    """Who takes which rank, and who waits. A process is known by its number (`slot`), from 0 in the order of starts.

    Args:
        wanted: the number of ranks that the user wants. They have the first slots.
        survive: what the run does about losses.

    Attributes:
        ranks: the slot of each rank.
        waiting: slots without a rank that have to be waited for: they have just been started.
        ready: slots without a rank that can take one.
        number: of the last call.
        urgent: the number of the last call that was made because ranks had died.
        layout: of the ranks now.
    """

    def __init__(self, wanted: int, survive: LossPolicy) -> None:
        self.wanted, self.survive = wanted, survive
        self.ranks = list(range(wanted))
        self.waiting: list[int] = []
        self.ready: list[int] = []
        self.number, self.layout = 0, FewerRanks(wanted)
        self.urgent, self._next = 0, wanted
        self._hosts: dict[int, int] = {}

    def settle(self, slots: Iterable[int], host: int) -> None:
        """These processes are on this host. A host is known by its first rank."""
        self._hosts |= dict.fromkeys(slots, host)

    def host_of(self, slot: int) -> int:
        """The host on which a process is. Host 0 is that of rank 0."""
        return self._hosts.get(slot, 0)

    def new_slots(self, count: int, host: int = 0) -> list[int]:
        """Slots of so many processes that are started now on a host, and wait for a place."""
        found = list(range(self._next, self._next + max(0, count)))
        self._next += len(found)
        self.waiting += found
        self.settle(found, host)
        return found

    def became_ready(self, slots: Iterable[int]) -> None:
        """These processes can take a rank now."""
        for slot in slots:
            self.waiting.remove(slot)
            self.ready.append(slot)

    def forget(self, slot: int) -> None:
        """A process without a rank has died."""
        for those in (self.waiting, self.ready):
            if slot in those:
                those.remove(slot)

    def after_loss(self, lost: Iterable[int]) -> bool:
        """Ranks have died: divide the others anew. Returns whether there are processes for all places.

        A layout of fewer ranks may be not allowed, or not there. Then processes that have just been started get the
        places that are left, and the others wait for them."""
        gone = set(lost)
        living = {rank: slot for rank, slot in enumerate(self.ranks) if rank not in gone}
        there = len(living) + len(self.ready)
        layout = FewerRanks(self.wanted)
        if there < self.wanted and self.survive.fewer is not None and there:
            layout = self.survive.fewer(there) or layout
        every = [*living.values(), *self.ready, *self.waiting]
        if len(every) < layout.ranks or all(map(self.host_of, every)):
            return False  # or nobody is left where the others look for rank 0
        self._fill(living, layout)
        self.urgent = self.number
        return True

    def grows(self) -> bool:
        """More processes can take part than do: divide them anew. Returns whether the layout has become larger."""
        there = len(self.ranks) + len(self.ready)
        if len(self.ranks) == self.wanted or not self.ready:
            return False
        layout = FewerRanks(self.wanted) if there >= self.wanted else self.survive.fewer and self.survive.fewer(there)
        if not layout or layout.ranks <= len(self.ranks):
            return False
        self._fill(dict(enumerate(self.ranks)), layout)
        return True

    def _fill(self, living: Mapping[int, int], layout: FewerRanks) -> None:
        """Ranks keep their numbers, where the layout has them. The others, then those that wait, fill the gaps.

        Of ranks without a place nothing is taken. So where some must wait, a copy of a part comes after all parts.
        Then the ranks of a host get numbers that follow each other, from host 0 on: rank 0 stays where it is looked
        for. Only a loss of ranks changes their numbers, if it leaves a gap that another host fills."""
        living = self._holders_first(living, layout.ranks)
        kept = {rank: slot for rank, slot in [*living.items()][: layout.ranks] if rank < layout.ranks}
        more = [*(slot for rank, slot in living.items() if rank not in kept), *self.ready, *self.waiting]
        if all(map(self.host_of, kept.values())):
            more.sort(key=lambda slot: self.host_of(slot) > 0)
        for rank in range(layout.ranks):
            if rank not in kept:
                kept[rank] = more.pop(0)
        self.ready = [slot for slot in more if slot not in self.waiting]
        self.ranks = sorted((kept[rank] for rank in range(layout.ranks)), key=self.host_of)
        self.layout = layout
        self.waiting = [slot for slot in self.waiting if slot not in self.ranks]
        self.number += 1

    def _holders_first(self, living: Mapping[int, int], places: int) -> Mapping[int, int]:
        """The ranks in the order in which they get so many places."""
        layout = self.layout
        if len(living) > places and not layout.parts and self.survive.fewer is not None:
            layout = self.survive.fewer(self.wanted) or layout
        if len(living) <= places or len(layout.parts) != len(self.ranks):
            return living
        first = dict[int, int]()
        for rank in living:
            first.setdefault(layout.parts[rank], rank)
        order = sorted(living, key=lambda rank: (rank not in first.values(), rank))
        return {rank: living[rank] for rank in order}
