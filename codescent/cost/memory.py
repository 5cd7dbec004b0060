"""In: a plan. Out: bytes that a rank sends or copies per step; and those that it holds, from plan/state.py.
Does not estimate the memory of activations and does not measure."""

from __future__ import annotations

from collections.abc import Callable

from codescent.plan import Plan, Traffic
from codescent.plan.state import StateBytes as StateBytes
from codescent.plan.state import state_bytes as state_bytes
from codescent.plan.state import state_of_rank as state_of_rank


def inside_bytes(plan: Plan) -> float:
    """Bytes per step that a rank copies between its own devices, or between device and host: the largest rank."""
    return _busiest(plan, lambda traffic: traffic.inside_bytes)


def wire_bytes(plan: Plan) -> float:
    """Bytes per step that a rank sends to other ranks, by the ring algorithms: the largest rank."""
    return _busiest(plan, lambda traffic: traffic.wire_bytes(plan.mesh.degree(traffic.axis)))


def _busiest(plan: Plan, bytes_of: Callable[[Traffic], float]) -> float:
    return max(
        sum(t.times * bytes_of(t) for t in plan.traffic if t.stage in (None, stage)) for stage in range(plan.mesh.pp)
    )
