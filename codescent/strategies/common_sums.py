"""In: a plan. Out: the collectives that every layout has: of gradients of replicated tensors, and of scalars.
Does not know the other collectives: each strategy declares its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from codescent.base.counted import counted
from codescent.plan import AXES, DTYPE_BYTES, SCALARS, Collective, Plan, TensorPlan, Traffic, Verb


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
    everyone = mesh.joint(*AXES)
    if mesh.degree(everyone) > 1:
        what = "loss, stop request and gradient norm"
        yield Traffic(Collective.ALL_REDUCE, everyone, SCALARS * 8, "fp64", Verb.STEP, None, what)


def copied(plan: Plan, tensors: Sequence[TensorPlan]) -> list[TensorPlan]:
    """The tensors of a stage whose gradients the ranks of tp compute alike, but may sum in another order.

    A message is summed over three or more ranks piece by piece. Each piece has its own order of ranks. The length of
    the message decides where the pieces begin. If tp divides a tensor unequally, its ranks send messages of different
    lengths. Their copies of other tensors would then drift apart. So the first rank of tp sends its gradients to the
    others.
    """
    mesh = plan.mesh
    unequal = any(
        tensor.parameter.shape[tensor.gradients.shards["tp"]] % mesh.tp
        for tensor in tensors
        if tensor.parameter.trained and "tp" in tensor.gradients.shards
    )
    if not unequal or mesh.dp_replicate * mesh.dp_shard * mesh.cp < 3:
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
