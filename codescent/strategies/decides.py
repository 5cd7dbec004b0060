"""In: a plan, names of keys. Out: keys of [parallel] that decide its losses, with their values, for `Strategy.decides`.
Does not know which strategy has which keys: each strategy declares its own."""

from __future__ import annotations

from codescent.plan import AXES, Plan, Scalar
from codescent.plan.wire import Wire

AVERAGED = ("average_every", "synchronous_steps", "fragments", "overlap_steps", "outer_optimizer")
OUTER = ("outer_learning_rate", "outer_momentum")


def keys_of(plan: Plan, *names: str) -> dict[str, Scalar]:
    """These keys of the layout."""
    return {f"parallel.{name}": getattr(plan.layout, name) for name in names}


def degrees_of(plan: Plan, *axes: str) -> dict[str, Scalar]:
    """The number of ranks on these axes: where each of them has a state, or a part of the batch, of its own."""
    return {f"parallel.{axis}": plan.mesh.degree(axis) for axis in axes}


def rounds_of(plan: Plan) -> dict[str, Scalar]:
    """The keys of rounds of steps, after which weights are averaged. A round divides a batch by replicas only."""
    outer = OUTER if plan.layout.outer_optimizer != "none" else ()
    return keys_of(plan, *AVERAGED, *outer) | degrees_of(plan, "dp_replicate")


def compression_of(plan: Plan) -> dict[str, Scalar]:
    """The keys of a lossy format of messages. Its residuals are those of a rank, so all degrees belong to them."""
    wire = Wire.parse(plan.layout.wire)
    if not wire.lossy:
        return {}
    return {"parallel.wire": str(wire)} | keys_of(plan, "wire_from") | degrees_of(plan, *AXES)
