"""In: a division by tp and cp, a micro-batch. Out: the seconds of a pass through each kind of depth.
Does not know weights and gradients that are sent (search_data.py does), or stages (search_cuts.py does)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from codescent.build.plan import operators
from codescent.clusters.cluster import Cluster, Software
from codescent.cost.stage_time import StageTime
from codescent.cost.time_parts import TimeParts
from codescent.plan import Instruction, Mesh, Verb
from codescent.planner.search_depths import SHARE_SAMPLES, Depths, candidate_of_piece, piece
from codescent.planner.search_space import Frame, Options, Space


class PassTime(NamedTuple):
    """Seconds of a depth in a pass of one micro-batch.

    Attributes:
        device_s: the device computes.
        host_s: it waits for its host besides.
        within_s: it waits for messages of its layers.
        beside_s: it waits for those of them that travel beside the computation, if nothing makes that longer.
    """

    device_s: float
    host_s: float
    within_s: float
    beside_s: float

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
        without = {"within_s": 0.0, "beside_s": 0.0}
        forward, backward = (
            tuple(one._replace(**without) for one in passes) for passes in (self.forward, self.backward)
        )
        return Computing(forward, backward, self.fixed_s)


def computing(
    space: Space, depths: Depths, frame: Frame, options: Options, cluster: Cluster, software: Software
) -> Computing:
    """The seconds of the depths. Of the frame tp, cp and the micro-batch count, of the options what layers compute."""
    tp, cp = frame.mesh.tp, frame.mesh.cp
    mesh = Mesh(dp_replicate=space.ranks // (tp * cp), cp=cp, tp=tp)
    candidate = candidate_of_piece(space, Frame(mesh, frame.microbatch_size, 1), options)
    plan = piece(space, depths, candidate, [(first, first + 1) for first in depths.first], SHARE_SAMPLES)
    plan = replace(plan, operators=operators(candidate))
    time, chunks = StageTime(plan, 0, cluster, software), range(len(depths.first))
    found = [
        [time.parts_of(Instruction(verb, number, chunk=chunk)) for chunk in chunks]
        for verb, number in ((Verb.FORWARD, 1), (Verb.BACKWARD, 0))  # neither the first nor the last one
    ]
    forward, backward = (
        tuple(_pass_time(time, of_pass, depth, one) for depth, one in zip(depths.first, parts, strict=True))
        for of_pass, parts in enumerate(found)
    )
    fixed_s = sum(parts[0].total_s - times[0].total_s for parts, times in zip(found, (forward, backward), strict=True))
    return Computing(forward, backward, fixed_s * len(chunks))


def _pass_time(time: StageTime, of_pass: int, depth: int, parts: TimeParts) -> PassTime:
    within_s = sum(time.always[of_pass, depth].within.values())
    device_s = parts.products_s + parts.attention_s + parts.moved_s
    return PassTime(device_s, parts.host_s, within_s, parts.exposed_s - within_s)
