"""In: a division of the weights. Out: the bytes that each kind of depth holds on a device, and the seconds of updates.
Does not know activations (kept.py does) and does not send anything (sent.py does)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from codescent.clusters.cluster import Cluster, Software
from codescent.cost.collective_time import seconds
from codescent.cost.stage_memory import stage_memory
from codescent.cost.update_time import update_time
from codescent.plan import Collective, Plan, Traffic, Verb
from codescent.planner.search.depths import SOME, Depths, candidate_of_piece, piece
from codescent.planner.search.space import LayoutFrame, Options, Space
from codescent.strategies import active


class HeldBytes(NamedTuple):
    """Bytes of weights, gradients and optimizer state on a device, and the seconds of their update.

    Attributes:
        state: bytes.
        update_s: of the update of what is on the device.
        host_s: of what is on its host.
        copies_s: of copies between both, at least: without latencies.
    """

    state: float = 0.0
    update_s: float = 0.0
    host_s: float = 0.0
    copies_s: float = 0.0

    @property
    def ends_s(self) -> float:
        """Of the update, at least: the host copies some while it updates others."""
        return self.update_s + max(self.host_s, self.copies_s)


@dataclass(frozen=True)
class Holding:
    """What is held.

    Attributes:
        kinds: of a depth of each kind.
        ends: of the embedding and the head together: a matrix that both read is one.
        plan: of the piece.
    """

    kinds: tuple[HeldBytes, ...]
    ends: HeldBytes
    plan: Plan


def holding(
    space: Space, depths: Depths, frame: LayoutFrame, options: Options, cluster: Cluster, software: Software
) -> Holding:
    """What is held. A stage is like another one, so of those of the frame it counts whether there are several."""
    mesh, alone = replace(frame.mesh, pp=1), {"parallel.sequence_parallel": False}  # no tensor has sums over tp
    candidate = candidate_of_piece(space, frame._replace(mesh=mesh), {**options, **alone})
    plan = piece(space, depths, candidate, depths.chunks(frame.mesh.pp), ("dp_shard",))
    kinds = tuple(_held(plan, depths, [first], cluster, software, space.ranks) for first in depths.first)
    return Holding(kinds, _held(plan, depths, [0, depths.last], cluster, software, space.ranks), plan)


def _held(plan: Plan, depths: Depths, some: list[int], cluster: Cluster, software: Software, ranks: int) -> HeldBytes:
    names = {parameter.name for parameter in depths.parameters(some)}
    tensors = tuple(tensor for tensor in plan.tensors if tensor.parameter.name in names)
    if not tensors:
        return HeldBytes()
    alone = replace(plan, tensors=tensors, traffic=())
    memory = stage_memory(alone, 0, cluster, software)
    copies_s = sum(_bytes_s(record, alone, cluster, software) for record in _copies(alone))
    update = update_time(alone, 0, cluster, software, ranks)
    return HeldBytes(memory.weights + memory.gradients + memory.optimizer, update.device_s, update.host_s, copies_s)


def _copies(plan: Plan) -> Iterator[Traffic]:
    """What STEP copies between device and host."""
    for strategy in active(plan):
        if not strategy.axis:
            found = strategy.traffic(plan, 0)
            yield from (one for one in found if one.verb is Verb.STEP and one.collective is Collective.COPY)


def _bytes_s(record: Traffic, plan: Plan, cluster: Cluster, software: Software) -> float:
    """The seconds of a message, without its latency: those of several depths are one."""
    whole_s, empty_s = (
        seconds(one, plan.mesh, 0, cluster, software)[1] for one in (record, replace(record, payload_bytes=0))
    )
    return whole_s - empty_s


def gathered(found: Holding, depths: Depths, counts: tuple[int, ...], cluster: Cluster, software: Software) -> float:
    """Bytes of what is gathered for a time in a stage with so many depths of each kind.

    Those of a depth beyond SOME of a kind are what one more depth adds.
    """
    some = [min(number, SOME) for number in counts]
    here = {first + at for (first, _), number in zip(depths.runs, some, strict=True) for at in range(number)}
    total = _gathered(found.plan, here, cluster, software)
    for (first, _), number in zip(depths.runs, counts, strict=True):
        if number > SOME:
            total += (number - SOME) * (total - _gathered(found.plan, here - {first + 1}, cluster, software))
    return total


def _gathered(plan: Plan, here: set[int], cluster: Cluster, software: Software) -> float:
    traffic = tuple(record for record in plan.traffic if record.depths[0] in here)
    return stage_memory(replace(plan, tensors=plan.tensors[:1], traffic=traffic), 0, cluster, software).gathered
