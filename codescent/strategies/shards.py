"""In: a module on the meta device, process groups. Out: the module divided by torch's fully_shard, and its gradients.
Does not decide what is divided (zero does) and does not update weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from codescent.plan import Plan
from codescent.strategies.buckets import TORCH_DTYPE


def shard_(module: nn.Module, groups: dict[str, dist.ProcessGroup], plan: Plan, *, stage: int, wire_dtype: str) -> None:
    """Divide the module's parameters over dp_shard, block by block; they become DTensors on their wide dtype.

    Args:
        module: on the meta device; its blocks are in `module.blocks`.
        groups: this rank's group of each axis.
        plan: mesh and precision.
        stage: 3 frees the gathered weights of a block after its forward; 1 and 2 keep them until backward is done.
        wire_dtype: of gradients.
    """
    mesh = _device_mesh(groups, plan)
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if plan.work.precision == "bf16" else None, reduce_dtype=TORCH_DTYPE[wire_dtype]
    )
    blocks = module.blocks
    assert isinstance(blocks, nn.ModuleList)
    for block in blocks:
        # Backward begins with the last block: to free its weights would be to gather them again at once.
        free = stage == 3 and block is not blocks[-1]
        fully_shard(block, mesh=mesh, reshard_after_forward=free, mp_policy=policy)
    fully_shard(module, mesh=mesh, reshard_after_forward=False, mp_policy=policy)
    for unit in _units(module):
        # Gradients are sums over the global batch (the loss is divided by its tokens before): no mean over ranks.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    module.register_forward_hook(_free_without_backward)


def _free_without_backward(module: nn.Module, _inputs: object, _output: object) -> None:
    """What is kept gathered until backward is over would stay so after a forward pass that has none."""
    if not torch.is_grad_enabled():
        for unit in _units(module):
            unit.reshard()


def _device_mesh(groups: dict[str, dist.ProcessGroup], plan: Plan) -> DeviceMesh:
    """The data-parallel part of the plan's mesh around this rank, on the process groups that there are."""
    shard, copies = groups["dp_shard"], groups["dp_replicate"]
    device = "cuda" if torch.cuda.is_available() and "nccl" in dist.get_backend() else "cpu"
    if plan.mesh.dp_replicate == 1:
        return DeviceMesh.from_group(shard, device, mesh_dim_names=("dp_shard",))
    here = plan.mesh.coordinates(dist.get_rank())
    ranks = [
        [plan.mesh.rank_at({**here, "dp_replicate": copy, "dp_shard": part}) for part in range(plan.mesh.dp_shard)]
        for copy in range(plan.mesh.dp_replicate)
    ]
    return DeviceMesh.from_group(
        [copies, shard], device, mesh=torch.tensor(ranks), mesh_dim_names=("dp_replicate", "dp_shard")
    )


def _units(module: nn.Module) -> Iterator[FSDPModule]:
    return (unit for unit in module.modules() if isinstance(unit, FSDPModule))


class ShardedGradients:
    """Gradients that fully_shard reduces while backward runs. See Gradients.

    Args:
        module: as `shard_` has left it, its parameters in memory.
        groups: this rank's group of each axis.
        stage: 1 reduces the sum of all micro-batches once; 2 and 3 reduce each and add the shards.
    """

    def __init__(self, module: nn.Module, groups: dict[str, dist.ProcessGroup], stage: int) -> None:
        self.module = cast(FSDPModule, module)
        self.parameters = list(module.parameters())
        self.groups = [group for axis in ("dp_shard", "dp_replicate") if (group := groups[axis]).size() > 1]
        self.stage = stage

    def before_backward(self, *, last: bool) -> None:
        """See Gradients."""
        self.module.set_is_last_backward(last)
        if self.stage == 1:
            self.module.set_requires_gradient_sync(last)
        if self.stage < 3:
            self.module.set_reshard_after_backward(last)

    def reduce(self, scalars: torch.Tensor) -> None:
        """See Gradients. Backward has waited for the gradients already."""
        for group in self.groups:
            dist.all_reduce(scalars, group=group)

    def collect(self) -> Sequence[torch.Tensor]:
        """See Gradients. This rank's shards."""
        return [_local(parameter) for parameter in self.parameters]

    def release(self) -> None:
        """See Gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    def close(self) -> None:
        """See Gradients."""
        self.groups.clear()


def _local(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of the gradient; zeros where the parameter took no part in the loss."""
    assert isinstance(parameter, DTensor)
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros_like(parameter.to_local())
    assert isinstance(gradient, DTensor)
    return gradient.to_local()
