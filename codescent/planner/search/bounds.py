"""In: a layout of a space. Out: less than the seconds of its step and than the bytes of its fullest rank, by no Plan.
Does not decide what is priced (best.py does). tests/test_search.py compares the bounds with prices."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import cached_property, partial
from operator import add
from typing import Any, TypeVar

from codescent.base.refusal import Value
from codescent.clusters.cluster import Cluster, Software
from codescent.cost.lanes import StageLanes
from codescent.planner.search.computing import Computing, Layers
from codescent.planner.search.constants import Constants
from codescent.planner.search.cuts import Again, StageCut, cut_of
from codescent.planner.search.depths import Depths
from codescent.planner.search.held import HeldBytes, Holding, gathered, holding
from codescent.planner.search.kept import Kept
from codescent.planner.search.passes import PartTimes, Passes
from codescent.planner.search.paths import ZERO_BUBBLE, Paths
from codescent.planner.search.sent import Sending, sending
from codescent.planner.search.space import SCHEDULE, VIRTUAL, LayoutFrame, Options, Space, default_of
from codescent.strategies.pipeline import depths_of

T = TypeVar("T")
BUCKETS = 0.999
"""Tensors share buckets of gradients, which leave with the lowest of their depths. Here each tensor leaves by itself,
which may make a step a little longer."""
NOTHING_STAYS = [Again(0.0, 0.0, 0.0, 0.0)]
LAYERS = ("parallel.sequence_parallel", "parallel.recompute", "parallel.context")
"""Options that decide what layers compute and send."""
SCHEDULED = (*LAYERS, SCHEDULE, VIRTUAL)
"""Options that decide all but where the state is."""
STATE = ("parallel.zero_stage", "parallel.offload")
"""Options that decide where weights, gradients and optimizer state are."""


class Bounds:
    """Lower bounds of the layouts of a space. What several layouts have in common is computed once."""

    def __init__(self, space: Space, cluster: Cluster, software: Software) -> None:
        self.space, self.cluster, self.software = space, cluster, software
        self.depths = Depths(space)
        self.constants = Constants(space, cluster, software)
        self.layers = Layers(space, self.depths, cluster, software)
        self.all_depths = range(self.depths.last + 1)
        self._found: dict[Hashable, Any] = {}

    def _once(self, key: Hashable, make: Callable[[], T]) -> T:
        if key not in self._found:
            self._found[key] = make()
        found: T = self._found[key]
        return found

    # What a layout is made of

    def computing(self, frame: LayoutFrame, options: Options) -> Computing:
        """What the layers of a layout compute."""
        sequence, recompute, context = LAYERS
        mesh, aligned = frame.mesh, self._aligned(frame.mesh.pp)
        key = mesh.tp, mesh.cp, frame.microbatch_size, options[sequence], options[recompute], options[context], aligned
        return self._once(key, lambda: self._compute(frame, _some(options, *LAYERS)))

    def _compute(self, frame: LayoutFrame, chosen: Options) -> Computing:
        found = self.layers.computing(frame, chosen)
        return found if self._aligned(frame.mesh.pp) else found.without_messages()

    def sending(self, frame: LayoutFrame, options: Options) -> Sending:
        """What ranks send of weights and gradients."""
        zero_stage, offload = STATE
        key = Sending, frame.mesh, frame.microbatches > 1, options[zero_stage], options[offload]
        return self._once(key, lambda: self._send(frame, options))

    def _send(self, frame: LayoutFrame, options: Options) -> Sending:
        held = self.holding(frame, options).plan
        found = sending(held, self.depths, frame.mesh, self.cluster, self.software)
        return found if self._aligned(frame.mesh.pp) else found.without_messages()

    def _aligned(self, stages: int) -> bool:
        """Whether the groups of all stages lie on nodes as those of the first one do."""
        stage, devices = self.space.ranks // stages, self.cluster.devices
        return stages == 1 or stage % devices == 0 or devices % stage == 0

    def holding(self, frame: LayoutFrame, options: Options) -> Holding:
        """What ranks hold of weights, gradients and optimizer state."""
        mesh, several = frame.mesh, frame.microbatches > 1
        return self._once(
            (Holding, mesh, several, *(options[key] for key in STATE)), lambda: self._hold(frame, options)
        )

    def _hold(self, frame: LayoutFrame, options: Options) -> Holding:
        """Meshes that hold the same have one piece."""
        chosen, mesh = _some(options, *STATE), frame.mesh
        cp = mesh.cp if self.software.shards_over_cp else 1
        replicas = min(2, mesh.dp_replicate * mesh.cp // cp) if mesh.dp_shard == 1 else 1  # they copy gradients
        ranks = replace(mesh, pp=min(2, mesh.pp), dp_replicate=replicas, cp=cp)
        one = LayoutFrame(ranks, 1, min(2, frame.microbatches))
        arguments = self.space, self.depths, one, chosen, self.cluster, self.software
        return self._once(("holding", *one, *chosen.values()), partial(holding, *arguments))

    def _kept(self, frame: LayoutFrame, options: Options) -> Kept:
        chosen = {**_some(options, *LAYERS[:2]), SCHEDULE: _splits(options)}
        key = Kept, frame.mesh.pp > 1, frame.mesh.tp, frame.mesh.cp, frame.microbatch_size, *chosen.values()
        arguments = self.space, self.depths, frame, chosen, self.cluster, self.software
        return self._once(key, partial(Kept, *arguments))

    def _cut(self, frame: LayoutFrame, options: Options) -> StageCut:
        pp, virtual = frame.mesh.pp, int(str(options[VIRTUAL])) if frame.mesh.pp > 1 else 1

        def make() -> StageCut:
            candidate = self.space.candidate_with(frame, {VIRTUAL: virtual})
            return cut_of(self.depths, depths_of(candidate), pp)

        return self._once((StageCut, pp, virtual), make)

    # Seconds

    def least_s(self, frame: LayoutFrame, options: Options) -> float:
        """Less than the seconds of a step, whatever the schedule and the place of the state. `options`: LAYERS.

        Some stage has the mean of the work, or more. One micro-batch goes there and back; only gradients of weights,
        which are not passed on, may be computed beside it.
        """
        found, counts = self.computing(frame, options), self.depths.counts(self.all_depths)
        forward_s, backward_s = (
            sum(number * one.total_s for number, one in zip(counts, passes, strict=True))
            for passes in (found.forward, found.backward)
        )
        passed_on = 1.0 if frame.mesh.pp == 1 else 1.0 - self.constants.weights
        mean_s = frame.microbatches / frame.mesh.pp * (forward_s + backward_s)
        return max(mean_s, forward_s + passed_on * backward_s)

    def scheduled(self, frame: LayoutFrame, options: Options) -> Scheduled:
        """The bounds of a schedule, wherever the state is. `options`: LAYERS and the schedule."""
        return Scheduled(self, frame, options)

    def step_s(self, frame: LayoutFrame, options: Options) -> float:
        """Less than the seconds of a step."""
        return BUCKETS * self._all_paths(frame, options).longest_s(str(options[SCHEDULE]))

    def step_in_lanes_s(self, frame: LayoutFrame, options: Options, lanes: StageLanes) -> float:
        """As `step_s`, and closer: instruction by instruction. `lanes`: of the schedule."""
        return BUCKETS * self._all_paths(frame, options).in_lanes_s(lanes)

    def _all_paths(self, frame: LayoutFrame, options: Options) -> Paths:
        cut, sent, held = self._cut(frame, options), self.sending(frame, options), self.holding(frame, options)
        key = "ends", id(cut), id(sent), id(held)  # all of them stay in `_found`
        ends_s = self._once(key, lambda: tuple(sent.step_s + self.of_state(held, one).ends_s for one in cut.counts))
        return self.paths(frame, options, sent, ends_s)

    def paths(self, frame: LayoutFrame, options: Options, sent: Sending | None, ends_s: tuple[float, ...]) -> Paths:
        """The instructions of a step. `sent`: None: of no rank. `ends_s`: of the last one, by stage."""
        cut, computed, whole = self._cut(frame, options), self.computing(frame, options), frame.mesh.pp == 1

        passes = self.passes(computed, sent, whole=whole, exact=frame.microbatches > 1)
        fixed_s = computed.fixed_s / 2 / cut.chunks
        stays = NOTHING_STAYS * len(cut.parts)
        if sent is not None:
            stays = self.again(cut, str(options[SCHEDULE]), frame.microbatches)
        each = [passes.of(part, again) for part, again in zip(cut.parts, stays, strict=True)]
        reduce_s, bucket_s = (0.0, math.inf) if sent is None else (sent.reduce_s, sent.bucket_s)
        times = tuple(
            self._times(one, fixed_s, 0.0 if 0 in part else bucket_s) for one, part in zip(each, cut.parts, strict=True)
        )
        messages_s: list[float] = self._once(
            ("message", frame.mesh.pp, frame.mesh.cp, frame.mesh.tp, frame.microbatch_size, options[LAYERS[0]]),
            lambda: self.constants.messages_s(frame, _some(options, LAYERS[0])),
        )
        return Paths(cut, times, frame.microbatches, messages_s, self.constants.weights, reduce_s, ends_s)

    def again(self, cut: StageCut, schedule: str, microbatches: int) -> list[Again]:
        """See `StageCut.again`."""
        return self._once(("again", id(cut), schedule, microbatches), lambda: cut.again(schedule, microbatches))

    def passes(self, computed: Computing, sent: Sending | None, *, whole: bool, exact: bool) -> Passes:
        """The passes of parts of the model. `exact`: there are several micro-batches."""
        return self._once(
            ("passes", id(computed), id(sent), whole),
            lambda: Passes(self.depths, computed, sent, self.software, whole=whole, exact=exact),
        )

    def _times(self, found: PartTimes, fixed_s: float, bucket_s: float) -> PartTimes:
        """`bucket_s`: what the last backward pass may lack of the gradients of its depths.

        A bucket of gradients leaves with the lowest of its depths. So only those of depth 0 surely leave with their
        part. Of others one bucket may leave with another part; which one does not matter, as each depth fills one.
        """
        last = max(min(found.last, found.backward), found.last - bucket_s)
        return PartTimes(
            forward=found.forward + fixed_s,
            backward=found.backward + fixed_s,
            first=found.first + fixed_s,
            last=last + fixed_s,
            left=found.left,
            gathers=found.gathers,
            most=found.most + fixed_s,
        )

    def of_state(self, held: Holding, counts: tuple[int, ...]) -> HeldBytes:
        """What a stage with so many depths of each kind holds."""

        def make() -> HeldBytes:
            found = [*zip(counts, held.kinds, strict=True)]
            ends = [HeldBytes()]
            if counts[0] and counts[-1]:
                found, ends = found[1:-1], [held.ends]
            fields = range(len(HeldBytes._fields))
            return HeldBytes(*(sum(n * one[at] for n, one in found) + ends[0][at] for at in fields))

        return self._once(("state", id(held), counts), make)

    # Bytes

    def bytes(self, frame: LayoutFrame, options: Options) -> float:
        """Less than the bytes of the fullest rank: those of the first rank of one of a few stages."""
        return self.scheduled(frame, options).bytes(frame, options)

    def least_bytes(self, frame: LayoutFrame, options: Options) -> float:
        """Less than `bytes`, whatever the schedule. `options`: LAYERS and STATE.

        Some stage has the mean number of blocks, or more. It keeps those of a micro-batch, or more, and their state.
        """
        kept, held = self._kept(frame, {**options, SCHEDULE: default_of(SCHEDULE)}), self.holding(frame, options)
        runs = [first for first, end in self.depths.runs[1:-1] if end - first > 1]
        block: float = min([kept.bytes(range(at, at + 2)) - kept.bytes(range(at, at + 1)) for at in runs], default=0)
        block += min(one.state for one in held.kinds[1:-1])
        return self.total_bytes(block * -(-(self.depths.last - 1) // frame.mesh.pp) + min(kept.again[1:-1]))

    def total_bytes(self, held: float) -> float:
        """What a device holds, with all that an allocator and libraries hold besides."""
        return self.constants.device_bytes + self.constants.allocated * held

    def state_bytes(self, frame: LayoutFrame, options: Options, cut: StageCut) -> tuple[float, ...]:
        """Of weights, gradients and optimizer state, and what is gathered: of the stages that may be the fullest."""

        def make() -> tuple[float, ...]:
            held, counts = self.holding(frame, options), [cut.counts[stage] for stage in cut.full]
            return tuple(self.of_state(held, one).state + self._gathered(held, one) for one in counts)

        key = frame.mesh, frame.microbatches > 1, options[STATE[0]], options[STATE[1]], id(cut)
        return self._once(key, make)

    def _gathered(self, held: Holding, counts: tuple[int, ...]) -> float:
        return self._once(
            ("gathered", id(held), counts),
            lambda: gathered(held, self.depths, counts, self.cluster, self.software),
        )

    def kept_of(self, frame: LayoutFrame, options: Options) -> tuple[float, ...]:
        """Of what forward passes keep, and of the head: of the stages that may be the fullest."""
        cut, kept = self._cut(frame, options), self._kept(frame, options)
        name = str(options[SCHEDULE])

        def of_stage(stage: int) -> float:
            flying = cut.flying(name, stage, frame.microbatches)
            found = sum(number * kept.bytes(cut.parts[part]) for part, number in flying.items())
            again = max(each for number, each in zip(cut.counts[stage], kept.again, strict=True) if number)
            return found + again + (kept.logits if cut.counts[stage][-1] else 0.0)

        key = "kept bytes", id(cut), id(kept), name, frame.microbatches
        return self._once(key, lambda: tuple(map(of_stage, cut.full)))


class Scheduled:
    """The bounds of all layouts that compute the same, in the same order.

    Attributes:
        computing_s: less than the seconds of a step, wherever the state is.
    """

    def __init__(self, bounds: Bounds, frame: LayoutFrame, options: Options) -> None:
        self.bounds, self.computed = bounds, bounds.computing(frame, options)
        self.schedule, self.microbatches = str(options[SCHEDULE]), frame.microbatches
        paths = bounds.paths(frame, options, None, (0.0,) * frame.mesh.pp)
        self.cut, self.computing_s = paths.cut, paths.longest_s(self.schedule)
        self.blocks = max(0, self.cut.least_blocks - self.cut.chunks) * frame.microbatches
        self._any = frame, options

    @cached_property
    def kept(self) -> tuple[float, ...]:
        """See `Bounds.kept_of`."""
        return self.bounds.kept_of(*self._any)

    @cached_property
    def kept_bytes(self) -> float:
        """As `bytes`, wherever the state is."""
        return self.bounds.total_bytes(max(self.kept))

    @cached_property
    def stays(self) -> list[Again]:
        """See `StageCut.again`."""
        return self.bounds.again(self.cut, self.schedule, self.microbatches)

    def bytes(self, frame: LayoutFrame, options: Options) -> float:
        """See `Bounds.bytes`."""
        state = self.bounds.state_bytes(frame, options, self.cut)
        return self.bounds.total_bytes(max(map(add, state, self.kept)))

    def busy_s(self, frame: LayoutFrame, options: Options) -> float:
        """As `computing_s`, also for all that sends more. It is known soonest.

        The fullest stage has all passes through its blocks.
        """
        if self.cut.stages == 1:
            return self.computing_s
        passes = self._passes(self.bounds.sending(frame, options))
        return max(self.computing_s, passes.busy_s(self.cut, self.stays, self.microbatches))

    def _passes(self, sent: Sending) -> Passes:
        return self.bounds.passes(self.computed, sent, whole=False, exact=self.microbatches > 1)

    def step_s(self, frame: LayoutFrame, options: Options) -> float:
        """As `Bounds.step_s`, and less, but sooner known.

        A step of a pipeline begins with the first pass of the first stage, and ends with its last one. In between, some
        stage has so many passes through blocks that send, or waits for as many of others.
        """
        if self.cut.stages == 1:
            return self.bounds.step_s(frame, options)
        sent = self.bounds.sending(frame, options)
        passes = self._passes(sent)
        begin = passes.of(self.cut.parts[self.cut.virtual[0]], self.stays[self.cut.virtual[0]])
        begins_s = max(begin.first - begin.forward, begin.gathers) if begin.gathers > 0.0 else 0.0
        ends_s = begin.left + sent.reduce_s + sent.step_s + self.ends_s(frame, options)
        return self.computing_s + begins_s + self.blocks * passes.block_s + ends_s

    def ends_s(self, frame: LayoutFrame, options: Options) -> float:
        """What the update adds to `step_s`, at most."""
        return self.bounds.of_state(self.bounds.holding(frame, options), self.cut.counts[0]).ends_s


def _some(options: Options, *keys: str) -> dict[str, Value]:
    return {key: options[key] for key in keys}


def _splits(options: Options) -> Value:
    """The schedule, as far as it decides what forward keeps."""
    return ZERO_BUBBLE if options[SCHEDULE] == ZERO_BUBBLE else default_of(SCHEDULE)
