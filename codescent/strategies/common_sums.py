"""In: a plan. Out: the all-reduces that every layout has: of partial gradients, and of scalars.
Does not know the other collectives: each strategy declares its own."""

from __future__ import annotations

from collections.abc import Iterator

from codescent.base.counted import counted
from codescent.plan import AXES, DIVIDING, DTYPE_BYTES, SCALARS, Collective, Plan, Traffic, Verb


def common_sums(plan: Plan) -> Iterator[Traffic]:
    """The all-reduces of every layout: of partial gradients of replicated tensors, and of scalars."""
    mesh = plan.mesh
    for stage in range(mesh.pp):
        tensors = plan.held_by(stage)
        for axis in dict.fromkeys(axis for tensor in tensors for axis in tensor.partial):
            parts = [tensor for tensor in tensors if axis in tensor.partial]
            dtype = parts[0].bucket_dtype or parts[0].gradient_dtype
            numel = sum(tensor.optimizer.numel(tensor.parameter.shape, mesh) for tensor in parts)
            payload_bytes, what = (
                numel * DTYPE_BYTES[dtype],
                f"partial gradients of {counted(len(parts), 'replicated tensor')}",
            )
            at = stage if mesh.pp > 1 else None
            yield Traffic(Collective.ALL_REDUCE, axis, payload_bytes, dtype, Verb.REDUCE, None, what, stage=at)
    everyone, parts_of = mesh.joint(*AXES), mesh.joint(*DIVIDING)
    if mesh.degree(everyone) > 1:
        yield Traffic(Collective.ALL_REDUCE, everyone, SCALARS * 8, "fp64", Verb.REDUCE, None, "loss and stop request")
    if mesh.degree(parts_of) > 1:
        yield Traffic(Collective.ALL_REDUCE, parts_of, 8, "fp64", Verb.STEP, None, "square of the gradient norm")
