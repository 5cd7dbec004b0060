"""In: the families of a search. Out: the layout that needs least memory of all.
Does not look for fast ones (best.py does). It builds the plans of those that may need least, and no other."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from codescent.planner.search.bounds import LAYERS, SCHEDULED, STATE, Bounds, Scheduled
from codescent.planner.search.factors import Factors, FactorsByValue, Family
from codescent.planner.search.found import LayoutChoice
from codescent.planner.search.queue import Queue
from codescent.planner.search.space import LayoutFrame

HELD = (*LAYERS, *STATE)
"""Options that decide what a block holds, whatever the schedule."""
Measure = Callable[[LayoutChoice], float]
"""Bytes of the fullest rank of a layout, by its plan."""


class LeastMemory:
    """The layout with the least bound of its bytes, until its plan is below all bounds."""

    def __init__(self, bounds: Bounds, factors: FactorsByValue, measure: Measure) -> None:
        self.bounds, self.factors, self.measure = bounds, factors, measure
        self.queue = Queue()
        self.least: LayoutChoice | None = None
        self.least_bytes = math.inf

    def of(self, families: Sequence[Family]) -> LayoutChoice:
        """The layout with the least memory. `families`: one or more.

        Families that differ in the size of their micro-batches alone need more with larger ones. So the next larger one
        comes in when the smaller one is divided.
        """
        alike: dict[tuple[int, int, int], list[Family]] = {}
        for family in families:
            mesh = family[0][0].mesh
            alike.setdefault((mesh.pp, mesh.cp, mesh.tp), []).append(family)
        for some in alike.values():
            self._begin(sorted(some, key=lambda one: one[0][0].microbatch_size))
        self.queue.until(lambda: self.least_bytes)
        assert self.least is not None
        return self.least

    def _begin(self, families: Sequence[Family]) -> None:
        smallest, *larger = families
        divided = [
            (self.bounds.least_bytes(max(left, key=_shards)[0], options), left)
            for options, left in self.factors.split(smallest, HELD)
        ]
        for bound, left in divided:
            self.queue.add(bound, partial(self._by_schedule, left))
        if larger:
            self.queue.add(min(bound for bound, _ in divided), partial(self._begin, larger))

    def _by_schedule(self, family: Family) -> None:
        for options, left in self.factors.split(family, SCHEDULED):
            found = self.bounds.scheduled(left[0][0], options)
            self.queue.add(found.kept_bytes, partial(self._by_layout, left, found))

    def _by_layout(self, family: Family, scheduled: Scheduled) -> None:
        for frame, factors in family:
            for options in self.factors.all(factors):
                layout = LayoutChoice(frame, options)
                self.queue.add(scheduled.bytes(*layout), partial(self._measure, layout))

    def _measure(self, layout: LayoutChoice) -> None:
        found = self.measure(layout)
        if found < self.least_bytes:
            self.least, self.least_bytes = layout, found


def _shards(one: tuple[LayoutFrame, Factors]) -> int:
    return one[0].mesh.dp_shard
