"""In: a space, a cluster, a software. Out: the fastest layouts that fit, the least memory, the first that does not fit.
Does not print (verbs/plan_search.py does). A Plan is built for a layout that may still be one of them, and no other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from codescent.build.accept import changed
from codescent.build.plan import build
from codescent.clusters.cluster import Cluster, Software
from codescent.cost.lanes import StageLanes, lanes_of
from codescent.cost.price import price
from codescent.cost.stage_memory import Fitting, StageMemory, stage_memory
from codescent.plan import Plan
from codescent.plan.schedule import accumulate
from codescent.planner.search_bounds import LAYERS, Bounds, Scheduled
from codescent.planner.search_factors import Factors, FactorsByValue, Family
from codescent.planner.search_found import Counts, Found, Layout, Searched
from codescent.planner.search_queue import Queue
from codescent.planner.search_rules import Rules
from codescent.planner.search_space import SCHEDULE, VIRTUAL, Frame, Space, default_of
from codescent.strategies.pipeline import Pipeline

WANTED = 10
"""So many of the fastest layouts are found."""
RECOMPUTE = "parallel.recompute"
MESSAGES = tuple(key for key in LAYERS if key != RECOMPUTE)
"""Options that decide what layers send."""
SCHEDULED = (*LAYERS, SCHEDULE, VIRTUAL)
"""Options that decide all but where the state is."""


class Search:
    """A search for the fastest layouts.

    A family of frames has a bound that holds for all its layouts. While it has the least bound of all it is divided: by
    what layers compute, by schedules, then into layouts. A layout with the least bound gets a closer one, then a Plan
    and a price.
    """

    def __init__(self, space: Space, cluster: Cluster, software: Software, wanted: int = WANTED) -> None:
        self.space, self.cluster, self.software, self.wanted = space, cluster, software, wanted
        self.rules, self.bounds = Rules(space), Bounds(space, cluster, software)
        self.counts = Counts()
        self.factors = FactorsByValue()
        self.families: dict[tuple[int, ...], list[tuple[Frame, Factors]]] = {}
        self.fast, self.unfit = Queue(), Queue()
        self.fitting: list[Found] = []
        self.too_large: list[Found] = []
        self._lanes: dict[tuple[object, ...], StageLanes] = {}

    def run(self) -> Searched:
        """Search."""
        for frame in self.space.frames():
            self._admit(frame)
        for family in self.families.values():
            self._by_computing(family)
        self.fast.until(lambda: _limit_s(self.fitting, self.wanted))
        self.unfit.until(lambda: _limit_s(self.too_large, 1))
        best = sorted(self.fitting, key=lambda one: one.order)[: self.wanted]
        first_unfit = min(self.too_large, key=lambda one: one.order, default=None)
        return Searched(self.space, tuple(best), None, first_unfit, self.counts)

    def _admit(self, frame: Frame) -> None:
        """Count the layouts of a frame."""
        admitted, counts = self.rules.admitted(frame), self.counts
        counts.combinations += admitted.combinations
        counts.refused += admitted.refused
        counts.other_losses += admitted.other_losses
        counts.admissible += admitted.number
        if not admitted.number:
            return
        same = frame.mesh.pp, frame.mesh.cp, frame.mesh.tp, frame.microbatch_size
        self.families.setdefault(same, []).append((frame, admitted.factors))

    def _by_computing(self, family: Family) -> None:
        """Bound a family by its layouts that compute least."""
        for chosen, left in self.factors.split(family, MESSAGES):
            bound_s = self.bounds.least_s(family[0][0], {**chosen, RECOMPUTE: default_of(RECOMPUTE)})
            self.fast.add(bound_s, partial(self._by_layers, left))

    def _by_layers(self, family: Family) -> None:
        for layers, left in self.factors.split(family, LAYERS):
            self.fast.add(self.bounds.least_s(family[0][0], layers), partial(self._by_schedule, left))

    def _by_schedule(self, family: Family) -> None:
        for options, left in self.factors.split(family, SCHEDULED):
            found = self.bounds.scheduled(family[0][0], options)
            self.fast.add(found.computing_s, partial(self._by_layout, left, found))

    def _by_layout(self, family: Family, scheduled: Scheduled) -> None:
        limit = self.cluster.device.memory_bytes
        fits, too_large = list[Layout](), list[Layout]()
        for frame, factors in family:
            for options in self.factors.all(factors):
                large = scheduled.kept_bytes > limit or scheduled.bytes(frame, options) > limit
                (too_large if large else fits).append(Layout(frame, options))
        self._bound_all(self.fast, scheduled, fits)
        if too_large:
            self.counts.unfit += len(too_large)
            self.unfit.add(scheduled.computing_s, partial(self._bound_all, self.unfit, scheduled, too_large))

    def _bound_all(self, queue: Queue, scheduled: Scheduled, layouts: Sequence[Layout]) -> None:
        for layout in layouts:
            queue.add(scheduled.step_s(*layout), partial(self._bound, queue, layout))

    def _bound(self, queue: Queue, layout: Layout) -> None:
        queue.add(self.bounds.step_s(*layout), partial(self._refine, queue, layout))

    def _refine(self, queue: Queue, layout: Layout) -> None:
        price = self._price if queue is self.fast else self._price_unfit
        if layout.frame.mesh.pp == 1:  # the bound has all instructions already
            price(layout)
            return
        bound_s = self.bounds.step_in_lanes_s(*layout, self._lanes_of(layout))
        queue.add(bound_s, partial(price, layout))

    def _lanes_of(self, layout: Layout) -> StageLanes:
        frame, options = layout
        key = options[SCHEDULE], options[VIRTUAL], frame.mesh.pp, frame.microbatches
        if key not in self._lanes:
            candidate = self.space.candidate_with(frame, options)
            self._lanes[key] = lanes_of(Pipeline().schedule(accumulate(1), candidate))
        return self._lanes[key]

    def _price(self, layout: Layout) -> None:
        plan = self.plan(layout)
        memory = self._memory(plan)
        if self._fitting(memory) is Fitting.TOO_LARGE:  # its seconds are not needed, unless all that fit are slower
            self.counts.unfit += 1
            self.unfit.add(self.bounds.step_s(*layout), partial(self._price_unfit, layout))
            return
        self.counts.simulated += 1
        self.fitting.append(self._found(layout, plan, memory))

    def _price_unfit(self, layout: Layout) -> None:
        plan = self.plan(layout)
        self.too_large.append(self._found(layout, plan, self._memory(plan)))

    def plan(self, layout: Layout) -> Plan:
        """The plan of a layout. Raises UserError: build refuses it after all."""
        config = changed(self.space.start, self.space.change(*layout))
        return build(config, self.space.vocab_size, self.space.ranks)

    def _memory(self, plan: Plan) -> StageMemory:
        held = (stage_memory(plan, stage, self.cluster, self.software) for stage in range(plan.mesh.pp))
        return max(held, key=lambda one: one.total)

    def _fitting(self, memory: StageMemory) -> Fitting:
        return memory.verdict(self.cluster.device, calibrated=bool(self.software.fitted_on))

    def _found(self, layout: Layout, plan: Plan, memory: StageMemory) -> Found:
        lanes = self._lanes_of(layout) if plan.mesh.pp > 1 else None
        priced = price(plan, self.cluster, self.software, lanes)
        return Found(layout, self.space.change(*layout), priced, memory, self._fitting(memory))


def _limit_s(found: Sequence[Found], wanted: int) -> float:
    """The seconds of the last one that is wanted; inf: more are wanted."""
    return sorted(one.price.step_s for one in found)[wanted - 1] if len(found) >= wanted else math.inf
