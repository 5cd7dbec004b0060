"""In: a division by tp and cp, a micro-batch. Out: the seconds of a pass through each kind of depth.
Does not know weights and gradients that are sent (data.py does), or stages (cuts.py does)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from codescent.build.plan import operators
from codescent.clusters.cluster import Cluster, Software
from codescent.cost.stage_time import StageTime
from codescent.cost.time_parts import TimeParts
from codescent.plan import Instruction, Mesh, Plan, Verb
from codescent.plan.operators import LayerOperator
from codescent.planner.search.depths import SHARE_SAMPLES, Depths, candidate_of_piece, piece
from codescent.planner.search.sent import NONE, Seconds, by_link
from codescent.planner.search.space import LayoutFrame, Options, Space
from codescent.strategies import active


class PassTime(NamedTuple):
    """Seconds of a depth in a pass of one micro-batch.

    Attributes:
        device_s: the device computes.
        host_s: it waits for its host besides.
        beside_s: it waits for messages of its layers that travel beside the computation, if nothing makes that longer.
        within: by link: messages of its layers for which it waits.
        beside: by link: those that travel beside the computation.
    """

    device_s: float
    host_s: float
    beside_s: float = 0.0
    within: Seconds = NONE
    beside: Seconds = NONE

    @property
    def within_s(self) -> float:
        """It waits for messages of its layers."""
        return sum(self.within)

    @property
    def total_s(self) -> float:
        """All of them."""
        return self.device_s + self.host_s + self.within_s + self.beside_s


@dataclass(frozen=True)
class Computing:
    """What the depths compute.

    Attributes:
        forward, backward: by kind of depth.
        fixed_s: of the passes of a micro-batch through a stage, beside its depths.
    """

    forward: tuple[PassTime, ...]
    backward: tuple[PassTime, ...]
    fixed_s: float

    def without_messages(self) -> Computing:
        """The same, as if no layer sent anything."""
        forward, backward = (
            tuple(PassTime(one.device_s, one.host_s) for one in passes) for passes in (self.forward, self.backward)
        )
        return Computing(forward, backward, self.fixed_s)


class Layers:
    """What the depths of a model compute, by division and micro-batch."""

    def __init__(self, space: Space, depths: Depths, cluster: Cluster, software: Software) -> None:
        self.space, self.depths, self.cluster, self.software = space, depths, cluster, software
        self._placed: dict[tuple[object, ...], Plan] = {}
        self._operators: dict[tuple[object, ...], tuple[LayerOperator, ...]] = {}

    def computing(self, frame: LayoutFrame, options: Options) -> Computing:
        """The seconds of the depths in passes between the first and the last one. Of the frame tp, cp and the size of
        the micro-batch count."""
        plan = self._plan(frame, options)
        time, chunks = StageTime(plan, 0, self.cluster, self.software), range(len(self.depths.first))
        found = [
            [time.parts_of(Instruction(verb, number, chunk=chunk)) for chunk in chunks]
            for verb, number in ((Verb.FORWARD, 1), (Verb.BACKWARD, 0))  # neither the first nor the last one
        ]
        forward, backward = (
            tuple(_pass_time(time, of_pass, depth, one) for depth, one in zip(self.depths.first, parts, strict=True))
            for of_pass, parts in enumerate(found)
        )
        rests = zip(found, (forward, backward), strict=True)
        fixed_s = sum(parts[0].total_s - times[0].total_s for parts, times in rests)
        return Computing(forward, backward, fixed_s * len(chunks))

    def _plan(self, frame: LayoutFrame, options: Options) -> Plan:
        """A depth of each kind as a chunk. Neither the tensors nor the operators depend on what is computed again."""
        tp, cp, size = frame.mesh.tp, frame.mesh.cp, frame.microbatch_size
        mesh = Mesh(dp_replicate=self.space.ranks // (tp * cp), cp=cp, tp=tp)
        candidate = candidate_of_piece(self.space, LayoutFrame(mesh, size, 2), options)
        same = tp, cp, candidate.layout.sequence_parallel
        if same not in self._placed:
            chunks = [(first, first + 1) for first in self.depths.first]
            self._placed[same] = piece(self.space, self.depths, candidate, chunks, ())
        if (*same, size) not in self._operators:
            self._operators[*same, size] = operators(candidate, self._placed[same].objective)
        plan = replace(self._placed[same], work=candidate.work, layout=candidate.layout)
        layers = (strategy for strategy in active(candidate) if strategy.axis in SHARE_SAMPLES)
        traffic = tuple(record for strategy in layers for record in strategy.traffic(plan, 0))
        return replace(plan, traffic=traffic, operators=self._operators[*same, size])


def _pass_time(time: StageTime, of_pass: int, depth: int, parts: TimeParts) -> PassTime:
    sent = time.always[of_pass, depth]
    within, beside = by_link([sent.within]), by_link([sent.beside])
    device_s = parts.products_s + parts.attention_s + parts.moved_s
    return PassTime(device_s, parts.host_s, parts.exposed_s - sum(within), within, beside)
