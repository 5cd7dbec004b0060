"""In: a plan, a rank. Out: bytes of the weights, gradients and optimizer state that the plan declares for the rank.
Does not estimate the memory of activations and does not measure (train/memory.py counts)."""

from __future__ import annotations

from dataclasses import dataclass

from codescent.base.dtypes import DTYPE_BYTES
from codescent.plan.mesh import AXES
from codescent.plan.plan import Plan
from codescent.plan.served import served_bytes
from codescent.plan.shard import Memory


@dataclass(frozen=True)
class StateBytes:
    """Bytes of a rank.

    `optimizer_bytes` includes the fp32 master weights of bf16 training, averages, and `Plan.kept`, such as anchors.
    `host_bytes` is the part in host memory, with `host_weights_bytes` and `host_gradients_bytes` of it.
    """

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    host_bytes: int = 0
    host_weights_bytes: int = 0
    host_gradients_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Bytes of weights, gradients and optimizer state, in device and host memory."""
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes

    @property
    def device_bytes(self) -> int:
        """The part in device memory."""
        return self.total_bytes - self.host_bytes

    @property
    def on_device(self) -> tuple[int, int, int]:
        """Of weights, gradients and optimizer state: the part in device memory."""
        weights = self.weights_bytes - self.host_weights_bytes
        gradients = self.gradients_bytes - self.host_gradients_bytes
        return weights, gradients, self.device_bytes - weights - gradients


def state_of_rank(plan: Plan, rank: int) -> StateBytes:
    """What the plan declares for one rank: its shards, which may be smaller than those of the first rank."""
    held = 0
    if rank in plan.servers:
        pieces = plan.pieces[plan.servers.index(rank)]
        held = served_bytes(plan.trained, pieces, plan.layout, plan.mesh.world_size)
    if rank not in plan.mesh:
        pieces = plan.pieces[plan.servers.index(rank)]
        weights = sum(piece.numel * DTYPE_BYTES[plan.trained[piece.index].optimizer_dtype] for piece in pieces)
        return StateBytes(weights, 0, held - weights)
    tensors = plan.held_by(plan.mesh.coordinates(rank)["pp"])
    served = plan.layout.served and not plan.layout.served_rounds  # the servers have the optimizer
    return StateBytes(
        weights_bytes=sum(tensor.weights_bytes(plan.mesh, rank) for tensor in tensors),
        gradients_bytes=sum(tensor.gradients_bytes(plan.mesh, rank) for tensor in tensors),
        optimizer_bytes=sum(tensor.optimizer_bytes(plan.mesh, rank) for tensor in tensors) * (not served)
        + kept_bytes(plan, rank)
        + held,
        host_bytes=sum(tensor.host_bytes(plan.mesh, rank) for tensor in tensors),
        host_weights_bytes=sum(
            tensor.weights_bytes(plan.mesh, rank) for tensor in tensors if tensor.weights_in is Memory.HOST
        ),
        host_gradients_bytes=sum(
            tensor.gradients_bytes(plan.mesh, rank) for tensor in tensors if tensor.gradients_in is Memory.HOST
        ),
    )


def kept_bytes(plan: Plan, rank: int) -> int:
    """Bytes of `Plan.kept` on a rank."""
    stage = plan.role(rank)
    return sum(kept.bytes(plan.mesh, rank) for kept in plan.kept if kept.stage in (None, stage))


def state_bytes(plan: Plan, *, servers: bool = False) -> StateBytes:
    """Bytes on the rank that holds the most (Rajbhandari et al. 2020, "ZeRO", figure 1), of those that train.

    `servers`: of all ranks.
    """
    firsts = (plan.mesh.rank_at({axis: stage * (axis == "pp") for axis in AXES}) for stage in range(plan.mesh.pp))
    stages = (state_of_rank(plan, rank) for rank in (*firsts, *(plan.servers if servers else ())))
    return max(stages, key=lambda state: (state.device_bytes, state.total_bytes))
