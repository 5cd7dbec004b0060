"""In: a plan, a rank, a cluster, a software. Out: the seconds of the rank's update: on the device, on its host.
Does not know the copies between both (the plan's traffic has them) or what hides them (stage_time.py does)."""

from __future__ import annotations

from typing import NamedTuple

from codescent.base.dtypes import DTYPE_BYTES
from codescent.base.errors import UserError
from codescent.clusters.cluster import Cluster, Software
from codescent.plan import Memory, Mesh, Plan, TensorPlan
from codescent.plan.state import state_of_rank

HOST_KEY = "node.host_bandwidth"
NO_HOST = f'how long the update in host memory takes is not known; give {HOST_KEY} of the cluster, such as "400GB/s"'


class UpdateTime(NamedTuple):
    """Seconds of an update: of what is in the memory of the device, and of what is in that of the host."""

    device_s: float
    host_s: float


def update_time(plan: Plan, rank: int, cluster: Cluster, software: Software, ranks: int | None = None) -> UpdateTime:
    """The seconds of the update of a rank.

    The optimizer reads gradients, reads and writes its state and master weights, and writes weights. All of this is
    moved once, at the bandwidth of the memory where the state is. All ranks of a node update at the same time, so each
    has its share of the memory of the host.

    Args:
        plan, rank, cluster, software: what is priced.
        ranks: of the run; None: those of the plan.

    Raises:
        UserError: state is in the memory of the host, and its bandwidth is not known.
    """
    held = plan.held_by(plan.mesh.coordinates(rank)["pp"])
    away = [tensor for tensor in held if tensor.parameter.trained and tensor.optimizer_in is Memory.HOST]
    state, mesh = state_of_rank(plan, rank), plan.mesh
    moved = 2.0 * (state.optimizer_bytes - sum(tensor.optimizer_bytes(mesh, rank) for tensor in away))
    moved += state.gradients_bytes - sum(tensor.gradients_bytes(mesh, rank) for tensor in away)
    moved += state.weights_bytes - sum(tensor.weights_bytes(mesh, rank) for tensor in away)
    device_s = moved / (cluster.device.memory_bytes_per_s * software.memory_efficiency)
    if not away:
        return UpdateTime(device_s, 0.0)
    if cluster.host_bytes_per_s is None:
        raise UserError(f"{cluster.name}: {NO_HOST}")
    shares = min(cluster.devices, mesh.world_size if ranks is None else ranks)
    rate = cluster.host_bytes_per_s * software.memory_efficiency / shares
    return UpdateTime(device_s, sum(host_moved_bytes(tensor, mesh, rank) for tensor in away) / rate)


def host_moved_bytes(tensor: TensorPlan, mesh: Mesh, rank: int) -> int:
    """Bytes that an update moves in the memory of the host.

    Gradients are read in the dtype in which they arrive, and weights written in the one in which they leave: the copies
    of a unit in a wider dtype stay in the caches of the CPU (Ren et al. 2021, "ZeRO-Offload", section 5).
    """
    numel = tensor.optimizer.numel(tensor.parameter.shape, mesh, rank)
    moved = 2 * tensor.optimizer_bytes(mesh, rank) + numel * DTYPE_BYTES[tensor.bucket_dtype or tensor.gradient_dtype]
    if tensor.updated_on_host:
        return moved + numel * DTYPE_BYTES[tensor.weight_dtype]
    in_place = tensor.weights_in is Memory.HOST and not tensor.master_dtype  # the weights are the master copy
    return moved + 2 * tensor.weights_bytes(mesh, rank) * in_place
