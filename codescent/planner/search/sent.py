"""In: a mesh, zero_stage, offload. Out: the seconds in which a pass sends weights and gradients of each depth.
Does not know what is held (held.py does), or what depths compute (computing.py does)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from codescent.clusters.cluster import Cluster, Software
from codescent.cost.collective_time import BETWEEN, BUS, INSIDE, seconds
from codescent.cost.device_time import copies_per_s
from codescent.cost.stage_time import PASSES, StageTime
from codescent.plan import Instruction, Mesh, Plan, Traffic, Verb
from codescent.planner.search.depths import Depths
from codescent.strategies import active
from codescent.strategies.common_sums import common_sums

LINKS = (INSIDE, BETWEEN, BUS)
Seconds = tuple[float, float, float]
"""By link, in the order of LINKS."""
NONE: Seconds = (0.0, 0.0, 0.0)


class DepthSent(NamedTuple):
    """What a pass sends of the weights and gradients of a depth.

    Attributes:
        before: weights, before the depth computes.
        after: gradients, when it is done.
        copied_s: seconds of the device, for the copies of both.
    """

    before: Seconds = NONE
    after: Seconds = NONE
    copied_s: float = 0.0


FORWARD, BACKWARD, FIRST, LAST = range(4)
"""Passes: of a micro-batch that is neither the first nor the last one; the first forward, the last backward pass."""


@dataclass(frozen=True)
class Sending:
    """What is sent.

    Attributes:
        passes: FORWARD, BACKWARD, FIRST and LAST: by depth of `Depths.some`.
        reduce_s: what REDUCE of the first stage waits for beside gradients that backward has sent.
        step_s: of STEP beside the update.
        together: whether gradients of several depths share a bucket, and so leave later than here.
        bucket_s: by how much a bucket makes a pass longer, at most; inf: it is not known.
    """

    passes: tuple[Mapping[int, DepthSent], ...]
    reduce_s: float
    step_s: float
    together: bool = False
    bucket_s: float = math.inf

    def without_messages(self) -> Sending:
        """The same, as if no weights and gradients were sent."""
        return Sending(tuple(dict.fromkeys(one, DepthSent()) for one in self.passes), 0.0, self.step_s)


def sending(held: Plan, depths: Depths, mesh: Mesh, cluster: Cluster, software: Software) -> Sending:
    """What is sent. `held`: the piece of `Holding`, whose tensors the ranks of the mesh hold."""
    bucket_bytes, layout = held.layout.bucket_bytes, replace(held.layout, bucket_bytes=1)  # a bucket for each tensor
    plan = replace(held, mesh=mesh, layout=layout, traffic=())
    strategies = (strategy for strategy in active(plan) if strategy.axis in ("dp_shard", "dp_replicate"))
    traffic = [record for strategy in strategies for record in strategy.traffic(plan, 0)]
    buckets = [record for record in traffic if record.verb is Verb.REDUCE and record.depths != (0, 0)]
    others = (record for record in traffic if record.verb in PASSES)
    time = StageTime(replace(plan, traffic=(*others, *_sums(plan))), 0, cluster, software)
    reduce_s = _place(time, buckets, bucket_bytes)
    step = time.parts_of(Instruction(Verb.STEP))
    passes = tuple(
        {depth: _sent(time, of_pass, depth, once=once) for depth in depths.some}
        for once in (False, True)
        for of_pass in (0, 1)
    )
    sizes = Counter[int]()
    for record in buckets:
        sizes[record.depths[0]] += record.payload_bytes
    together = any(size < bucket_bytes for size in sizes.values())
    reduce_s += sum(time.ends[Verb.REDUCE].values())
    rest_s = step.total_s - step.update_s
    return Sending(passes, reduce_s, rest_s, together, math.inf if together else _bucket_s(time, sizes, bucket_bytes))


def _bucket_s(time: StageTime, sizes: Mapping[int, int], bucket_bytes: int) -> float:
    """By how much a bucket makes a backward pass longer, at most: by its copies, and by the time in which it is sent
    beside the computation. `sizes`: bytes of the gradients of each depth."""
    copied_s = 2.0 * bucket_bytes / copies_per_s(time.cluster.device, time.software)
    sent_s = max((sum(time.once[1, depth].after.values()) / size for depth, size in sizes.items()), default=0.0)
    return time.software.contention * copied_s + (time.software.contention - 1.0) * sent_s * bucket_bytes


def _sums(plan: Plan) -> Iterator[Traffic]:
    """The sums of scalars, and without a pipeline those of gradients of tensors that several ranks have."""
    folded = replace(plan.mesh, pp=1, dp_replicate=plan.mesh.dp_replicate * plan.mesh.pp)
    for record in common_sums(replace(plan, mesh=folded)):
        if record.verb is not Verb.REDUCE or plan.mesh.pp == 1:
            yield record


def _place(time: StageTime, buckets: Iterable[Traffic], bucket_bytes: int) -> float:
    """Let backward send the buckets of gradients. Returns the seconds that REDUCE waits for the last one.

    A tensor of the size of a bucket has one for itself. Small ones share buckets, and the latency of each.
    """
    waits_s = 0.0
    for record in buckets:
        link, whole_s = seconds(record, time.plan.mesh, 0, time.cluster, time.software)
        if record.during is None:
            waits_s += whole_s
            continue
        if record.payload_bytes < bucket_bytes:
            whole_s = _in_bucket_s(record, time, whole_s, record.payload_bytes / bucket_bytes)
        time.once[1, record.depths[0]].after[link] += whole_s
    return waits_s


def _in_bucket_s(record: Traffic, time: StageTime, whole_s: float, share: float) -> float:
    """Seconds of a tensor in a bucket with others, or less. `whole_s`: by itself. `share`: of the bucket.

    On a line of latency and bandwidth it has its share of the latency. A curve may say anything of the bucket.
    """
    cluster, mesh = time.cluster, time.plan.mesh
    if cluster.inside.curve or cluster.between.curve:
        best = replace(cluster, inside=cluster.inside.fastest, between=cluster.between.fastest)
        return seconds(record, mesh, 0, best, replace(time.software, collective_s=0.0, hop_s=0.0))[1]
    latency_s = seconds(replace(record, payload_bytes=0), mesh, 0, cluster, time.software)[1]
    return whole_s - latency_s * (1.0 - share)


def _sent(time: StageTime, of_pass: int, depth: int, *, once: bool) -> DepthSent:
    found = [time.always[of_pass, depth], *([time.once[of_pass, depth]] if once else [])]
    before, after = (by_link([getattr(one, name) for one in found]) for name in ("before", "after"))
    return DepthSent(before, after, sum(one.copied_s for one in found))


def by_link(waits: Sequence[Mapping[str, float]]) -> Seconds:
    """The sum of seconds by link."""
    inside, between, bus = (sum(one.get(link, 0.0) for one in waits) for link in LINKS)
    return inside, between, bus
