"""In: a plan. Out: the collectives that every layout has: of gradients of replicated tensors, and of scalars.
Does not know the other collectives: each strategy declares its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from codescent.base.counted import counted
from codescent.plan import AXES, DTYPE_BYTES, ROUND_SCALARS, SCALARS, Collective, Plan, TensorPlan, Traffic, Verb
from codescent.plan.wire import Wire

DATA = ("dp_replicate", "dp_shard", "ep", "cp")
"""The axes over which gradients are summed."""


def common_sums(plan: Plan) -> Iterator[Traffic]:
    """The collectives of every layout: of gradients of replicated tensors, and of scalars."""
    mesh = plan.mesh
    for stage in range(mesh.pp):
        tensors = plan.held_by(stage)
        for axis in dict.fromkeys(axis for tensor in tensors for axis in tensor.partial):
            parts = [tensor for tensor in tensors if axis in tensor.partial]
            yield _exchange(plan, stage, Collective.ALL_REDUCE, axis, parts, "partial gradients")
        if parts := copied(plan, tensors):
            yield _exchange(plan, stage, Collective.BROADCAST, "tp", parts, "gradients")
    yield from _scalars(plan)


def _scalars(plan: Plan) -> Iterator[Traffic]:
    """The sums of scalars: of each step; where replicas train apart also of each round, and of the opening steps."""
    if plan.layout.hands_out:
        return  # they travel with pushes, pulls and requests for work
    everyone, opening, what = (
        plan.mesh.joint(*AXES),
        plan.schedule.opening_steps,
        "loss, stop request and gradient norm",
    )
    scalars, of_round = SCALARS + plan.objective_sums, ROUND_SCALARS + plan.objective_sums
    of_step = Traffic(Collective.ALL_REDUCE, plan.together, scalars * 8, "fp64", Verb.STEP, None, what, since=opening)
    sums = [of_step]
    if plan.apart:
        every, verb = plan.schedule.agrees_every, Verb.MERGE if plan.layout.gossip == "none" else Verb.EXCHANGE
        what = "loss, stop request, skipped steps, distance of the replicas"
        agreed = replace(of_step, axis=everyone, payload_bytes=of_round * 8, verb=verb, what=what)
        sums.append(replace(agreed, every=every, at=every - 1))
    if opening:
        sums.append(replace(of_step, axis=everyone, since=0, until=opening))
    yield from (record for record in sums if plan.mesh.degree(record.axis) > 1)


def copied(plan: Plan, tensors: Sequence[TensorPlan]) -> list[TensorPlan]:
    """The tensors of a stage whose gradients the ranks of tp compute alike, but may sum in another order.

    A message is summed over three or more ranks piece by piece. Each piece has its own order of ranks. The length of
    the message decides where the pieces begin. If tp divides a tensor unequally, its ranks send messages of different
    lengths. Their copies of other tensors would then drift apart. So the first rank of tp sends its gradients to the
    others. With a lossy `wire` it always does: what a value is rounded to depends on its neighbours in the message.
    """
    mesh = plan.mesh
    unequal = any(
        tensor.parameter.shape[tensor.gradients.shards["tp"]] % mesh.tp
        for tensor in tensors
        if tensor.parameter.trained and "tp" in tensor.gradients.shards
    )
    replicas = mesh.degree(mesh.joint(*(axis for axis in DATA if axis not in plan.apart)))
    rounds = Wire.parse(plan.layout.wire).lossy and not plan.apart
    if mesh.tp == 1 or not ((replicas > 2 and unequal) or (replicas > 1 and rounds)):
        return []
    return [
        tensor
        for tensor in tensors
        if tensor.parameter.trained and "tp" not in tensor.gradients.shards and "tp" not in tensor.partial
    ]


def _exchange(
    plan: Plan, stage: int, collective: Collective, axis: str, tensors: Sequence[TensorPlan], what: str
) -> Traffic:
    """A collective after the sums over data-parallel ranks, of gradients of tensors that an axis replicates."""
    dtype = tensors[0].bucket_dtype or tensors[0].gradient_dtype
    numel = sum(tensor.optimizer.numel(tensor.parameter.shape, plan.mesh) for tensor in tensors)
    what = f"{what} of {counted(len(tensors), 'replicated tensor')}"
    at = stage if plan.mesh.pp > 1 else None
    return Traffic(collective, axis, numel * DTYPE_BYTES[dtype], dtype, Verb.REDUCE, None, what, stage=at)
