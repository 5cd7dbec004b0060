"""In: a plan. Out: bytes of weights, gradients and optimizer state of a rank; bytes that it sends or copies per step.
Does not estimate the memory of activations and does not measure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from codescent.plan import Plan, Traffic


@dataclass(frozen=True)
class StateBytes:
    """Bytes on the rank that holds the most.

    `optimizer_bytes` includes the fp32 master weights of bf16 training. `host_bytes` is the part in host memory.
    """

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    host_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Bytes of weights, gradients and optimizer state, in device and host memory."""
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes

    @property
    def device_bytes(self) -> int:
        """The part in device memory."""
        return self.total_bytes - self.host_bytes


def state_bytes(plan: Plan) -> StateBytes:
    """Bytes of weights, gradients and optimizer state of a rank (Rajbhandari et al. 2020, "ZeRO", figure 1)."""
    stages = (_of_stage(plan, stage) for stage in range(plan.mesh.pp))
    return max(stages, key=lambda state: (state.device_bytes, state.total_bytes))


def _of_stage(plan: Plan, stage: int) -> StateBytes:
    tensors = plan.held_by(stage)
    return StateBytes(
        weights_bytes=sum(tensor.weights_bytes(plan.mesh) for tensor in tensors),
        gradients_bytes=sum(tensor.gradients_bytes(plan.mesh) for tensor in tensors),
        optimizer_bytes=sum(tensor.optimizer_bytes(plan.mesh) for tensor in tensors),
        host_bytes=sum(tensor.host_bytes(plan.mesh) for tensor in tensors),
    )


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
