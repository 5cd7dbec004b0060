"""In: a space, a cluster, a software. Out: the fastest layouts that fit, the least memory, the first that does not fit.
Does not print (verbs/plan_search.py does). A Plan is built for a layout that may still be one of them, and no other."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from functools import partial

from codescent.base.errors import UserError
from codescent.base.refusal import Value
from codescent.base.uncollected import uncollected
from codescent.build.accept import changed
from codescent.build.plan import bare_plan, build
from codescent.clusters.cluster import Cluster, Software
from codescent.cost.lanes import StageLanes, lanes_of
from codescent.cost.price import price
from codescent.cost.stage_memory import Fitting, StageMemory, stage_memory
from codescent.plan import Plan
from codescent.plan.schedule import accumulate
from codescent.planner.prediction import not_priced
from codescent.planner.search.bounds import LAYERS, SCHEDULED, Bounds, Scheduled
from codescent.planner.search.factors import Factors, FactorsByValue, Family
from codescent.planner.search.found import Counts, Found, LayoutChoice, Searched
from codescent.planner.search.least import LeastMemory
from codescent.planner.search.queue import Queue
from codescent.planner.search.rules import Rules
from codescent.planner.search.space import OFFLOAD, SCHEDULE, VIRTUAL, LayoutFrame, Space, default_of
from codescent.planner.search.words import FREE, kept_words
from codescent.strategies.pipeline import Pipeline

WANTED = 10
"""So many of the fastest layouts are found."""
UNFIT, BOUNDED, PRICED = 100, 40, 4
"""Of so many schedules with layouts that do not fit, those with the least bounds: so many layouts get a closer bound,
and so many of these a price."""
RECOMPUTE, ZERO = "parallel.recompute", "parallel.zero_stage"
MESSAGES = tuple(key for key in LAYERS if key != RECOMPUTE)
"""Options that decide what layers send."""


class LayoutSearch:
    """A search for the fastest layouts.

    A family of frames has a bound that holds for all its layouts. While it has the least bound of all it is divided: by
    what layers compute, by schedules, then into layouts. A layout with the least bound gets a closer one, then a Plan
    and a price.
    """

    def __init__(
        self,
        space: Space,
        cluster: Cluster,
        software: Software,
        wanted: int = WANTED,
        asked: str = "--search",
        release: str = FREE,
    ) -> None:
        """`wanted`: so many layouts. `asked`: what asks for them; messages begin with it. `release`: see `words`."""
        self.space, self.cluster, self.software, self.wanted = space, cluster, software, wanted
        self.asked, self.release = asked, release
        self.rules, self.bounds = Rules(space, cluster), Bounds(space, cluster, software)
        self.counts, self.factors, self.fast = Counts(), FactorsByValue(), Queue()
        self.families: dict[tuple[int, ...], list[tuple[LayoutFrame, Factors]]] = {}
        self.fitting: list[Found] = []
        self.unfit: list[tuple[Scheduled, list[LayoutChoice]]] = []
        self._lanes: dict[tuple[object, ...], StageLanes] = {}

    def run(self) -> Searched:
        """Search.

        Raises:
            UserError: build refuses all layouts, or none has a price.
        """
        with uncollected():
            best = self.fastest()
            return Searched(self.space, best, self.least_memory(), self._first_unfit(), self.counts)

    def fastest(self) -> tuple[Found, ...]:
        """The fastest layouts that fit, in order; none: nothing fits. Raises UserError: see `run`."""
        with uncollected():  # it keeps millions of objects, and a quarter of its time would go to looking at them
            self.admit()
            for family in self.families.values():
                self._by_computing(family)
            self.fast.until(self._limit_s)
        return tuple(sorted(self.fitting, key=lambda one: one.order)[: self.wanted])

    def admit(self) -> None:
        """Count the layouts, and put them into families.

        Raises:
            UserError: build refuses all of them, or none has a price.
        """
        for frame in self.space.frames():
            self._admit(frame)
        if not self.families:
            raise UserError(*self._problems())

    def _admit(self, frame: LayoutFrame) -> None:
        admitted, counts = self.rules.admitted(frame), self.counts
        counts.combinations += admitted.combinations
        counts.refused += admitted.refused
        counts.other_losses += admitted.other_losses
        counts.unpriced += admitted.unpriced
        counts.admissible += admitted.number
        if not admitted.number:
            return
        same = frame.mesh.pp, frame.mesh.cp, frame.mesh.tp, frame.microbatch_size
        self.families.setdefault(same, []).append((frame, admitted.factors))

    def _problems(self) -> list[str]:
        """Why nothing is admissible: why the config has no price here, whatever the layout; else what build says."""
        config, device = self.space.config, self.space.config.train.device
        if reasons := [*not_priced(bare_plan(config, self.space.candidate), self.cluster, device)]:
            return [f"{self.asked}: {reason}" for reason in reasons]
        try:
            build(self.space.start, self.space.vocab_size, self.space.ranks)
        except UserError as error:
            kept = kept_words(self.space.given, self.release)
            said = f"{self.asked}: every layout of these ranks is refused{kept}. Problems of the simplest one:"
            return [said, *error.problems] if len(error.problems) > 1 else [f"{said} {error}"]
        return [f"{self.asked}: every layout of these ranks is refused, or would change the losses"]

    def _by_computing(self, family: Family) -> None:
        """Bound a family by its layouts that compute least."""
        for chosen, left in self.factors.split(family, MESSAGES):
            bound_s = self.bounds.least_s(left[0][0], {**chosen, RECOMPUTE: default_of(RECOMPUTE)})
            self.fast.add(bound_s, partial(self._by_layers, left))

    def _by_layers(self, family: Family) -> None:
        for layers, left in self.factors.split(family, LAYERS):
            self.fast.add(self.bounds.least_s(left[0][0], layers), partial(self._by_schedule, left))

    def _by_schedule(self, family: Family) -> None:
        for options, left in self.factors.split(family, SCHEDULED):
            found = self.bounds.scheduled(left[0][0], options)
            self.fast.add(found.computing_s, partial(self._by_layout, left, found))

    def _by_layout(self, family: Family, scheduled: Scheduled) -> None:
        """Set aside what is too large by its bound. The others get a bound with what ranks send."""
        too_large, limit = list[LayoutChoice](), self.cluster.device.memory_bytes
        for frame, factors in family:
            if scheduled.kept_bytes > limit:
                too_large += [LayoutChoice(frame, options) for options in self.factors.all(factors)]
                continue
            alike: dict[Value, list[LayoutChoice]] = {}  # they differ in what is offloaded alone
            for options in self.factors.all(factors):
                alike.setdefault(options[ZERO], []).append(LayoutChoice(frame, options))
            for layouts in alike.values():
                too_large += self._by_offload(layouts, scheduled)
        if too_large:
            self.counts.unfit += len(too_large)
            self.unfit.append((scheduled, too_large))

    def _by_offload(self, layouts: list[LayoutChoice], scheduled: Scheduled) -> Iterator[LayoutChoice]:
        """Bound layouts that differ in what is offloaded. Yields those that are too large.

        Where nothing is offloaded, all but the update is fastest: what is offloaded is also copied. So the others come
        in when the turn of this one comes, if it is not too large.
        """
        limit, first = self.cluster.device.memory_bytes, layouts[0]
        for layout in layouts:
            if scheduled.bytes(*layout) > limit:
                yield layout
            elif len(layouts) > 1 and layout is first and layout.options[OFFLOAD] == default_of(OFFLOAD):
                self.fast.add(scheduled.busy_s(*layout), partial(self._add, layouts, scheduled))
                return
            else:
                self._add([layout], scheduled)

    def _add(self, layouts: list[LayoutChoice], scheduled: Scheduled) -> None:
        for layout in layouts:
            self.fast.add(scheduled.busy_s(*layout), partial(self._ends, layout, scheduled))

    def _ends(self, layout: LayoutChoice, scheduled: Scheduled) -> None:
        if layout.frame.mesh.pp == 1:  # its bound has all instructions already
            self.fast.add(self.bounds.step_s(*layout), partial(self._price, layout))
            return
        self.fast.add(scheduled.step_s(*layout), partial(self._bound, layout))

    def _bound(self, layout: LayoutChoice) -> None:
        self.fast.add(self.bounds.step_s(*layout), partial(self._refine, layout))

    def _refine(self, layout: LayoutChoice) -> None:
        self.fast.add(self.closest_s(layout), partial(self._price, layout))

    def closest_s(self, layout: LayoutChoice) -> float:
        """The closest of the bounds."""
        if layout.frame.mesh.pp == 1:
            return self.bounds.step_s(*layout)
        return self.bounds.step_in_lanes_s(*layout, self._lanes_of(layout))

    def _lanes_of(self, layout: LayoutChoice) -> StageLanes:
        frame, options = layout
        key = options[SCHEDULE], options[VIRTUAL], frame.mesh.pp, frame.microbatches
        if key not in self._lanes:
            candidate = self.space.candidate_with(frame, options)
            self._lanes[key] = lanes_of(Pipeline().schedule(accumulate(1), candidate))
        return self._lanes[key]

    def _price(self, layout: LayoutChoice) -> None:
        plan = self.plan(layout)
        memory = self._memory(plan)
        if self._fitting(memory) is Fitting.TOO_LARGE:
            self.counts.unfit += 1
            self.unfit.append((self.bounds.scheduled(*layout), [layout]))
            return
        self.counts.simulated += 1
        self.fitting.append(self._priced(layout, plan, memory))

    def _limit_s(self) -> float:
        """The seconds of the last one that is wanted; inf: more are wanted."""
        if len(self.fitting) < self.wanted:
            return math.inf
        return sorted(one.price.step_s for one in self.fitting)[self.wanted - 1]

    def least_memory(self) -> Found:
        """The layout with the least memory of all. `admit` comes before."""
        search = LeastMemory(self.bounds, self.factors, lambda layout: self._memory(self.plan(layout)).total)
        return self.found(search.of(list(self.families.values())))

    def _first_unfit(self) -> Found | None:
        """About the fastest of those that do not fit. A layout that fits may be faster."""
        fastest = sorted(self.unfit, key=lambda one: one[0].computing_s)[:UNFIT]
        bounds = [(scheduled.step_s(*layout), layout) for scheduled, layouts in fastest for layout in layouts]
        some = [layout for _, layout in heapq.nsmallest(BOUNDED, bounds, key=lambda one: one[0])]
        closer = heapq.nsmallest(PRICED, some, key=self.closest_s)
        return min(map(self.found, closer), key=lambda one: one.order, default=None)

    def plan(self, layout: LayoutChoice) -> Plan:
        """The plan of a layout. Raises UserError: build refuses it after all."""
        config = changed(self.space.start, self.space.change(*layout))
        return build(config, self.space.vocab_size, self.space.ranks)

    def found(self, layout: LayoutChoice) -> Found:
        """A layout with its price. Raises UserError: as `plan`."""
        plan = self.plan(layout)
        return self._priced(layout, plan, self._memory(plan))

    def _memory(self, plan: Plan) -> StageMemory:
        held = (stage_memory(plan, stage, self.cluster, self.software) for stage in range(plan.mesh.pp))
        return max(held, key=lambda one: one.total)

    def _fitting(self, memory: StageMemory) -> Fitting:
        return memory.verdict(self.cluster.device, calibrated=bool(self.software.fitted_on))

    def _priced(self, layout: LayoutChoice, plan: Plan, memory: StageMemory) -> Found:
        lanes = self._lanes_of(layout) if plan.mesh.pp > 1 else None
        priced = price(plan, self.cluster, self.software, lanes)
        return Found(layout, self.space.change(*layout), priced, memory, self._fitting(memory))
