"""In: a module, its blocks, a device mesh. Out: the module, sharded in place by torch's fully_shard, block by block.
Does not choose ZeRO stage, dtype or memory (host or device): shards.py does; for users' modules own/divide.py does."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.distributed import ProcessGroup, ReduceOp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from codescent.strategies.collectives import all_gather_into, reduce_scatter_into, start_all_gather


def shard_units_(
    module: nn.Module,
    blocks: Sequence[nn.Module],
    mesh: DeviceMesh,
    *,
    freed: Collection[nn.Module],
    whole: Collection[nn.Parameter],
    divisor: float,
    **policies: Any,
) -> None:
    """Shard every block, then the rest of the module. Parameters become DTensors, sharded along their first dim.

    Args:
        module: the module, changed in place.
        blocks: submodules that are gathered one at a time.
        mesh: axis of the shards; or axes of replicas and shards.
        freed: units whose gathered weights are freed after forward. Other units keep them until backward.
        whole: parameters that are not sharded.
        divisor: gradients are summed over the mesh, then divided by this number.
        policies: further arguments of `fully_shard`.
    """
    for unit in (*blocks, module):
        fully_shard(unit, mesh=mesh, reshard_after_forward=unit in freed, ignored_params=set(whole), **policies)
    for sharded in units(module):
        # A sum and one division, because only NCCL has a mean; gloo, on CPUs, has not.
        sharded.set_gradient_divide_factor(divisor)
        sharded.set_force_sum_reduction_for_comms(True)
    module.register_forward_hook(_free_without_backward)


class OurAllGather:
    """fully_shard's all-gather of weights, by collectives.py."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for the gathered weights."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: ProcessGroup, async_op: bool = False
    ) -> Any:
        """Gather, or begin to and return a handle."""
        return (start_all_gather if async_op else all_gather_into)(output_tensor, input_tensor, group=group)


class OurReduceScatter:
    """fully_shard's reduce-scatter of gradients, by collectives.py."""

    allocate = OurAllGather.allocate

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Sum. `shard_units_` has asked for sums, so `op` is no other one."""
        assert op == ReduceOp.SUM, op
        reduce_scatter_into(output_tensor, input_tensor, group=group)


def send_ourselves(module: nn.Module) -> None:
    """Let every unit of a sharded module send by collectives.py, as the strategies do."""
    for unit in units(module):
        unit.set_custom_all_gather(cast(Any, OurAllGather()))
        unit.set_custom_reduce_scatter(cast(Any, OurReduceScatter()))


def units(module: nn.Module) -> Iterator[FSDPModule]:
    """The module and its blocks, if they are sharded; none otherwise."""
    return (unit for unit in module.modules() if isinstance(unit, FSDPModule))


def own_parameters(unit: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Parameter]:
    """The parameters of a unit that belong to no other block."""
    others = {parameter for block in blocks if block is not unit for parameter in block.parameters()}
    return [parameter for parameter in unit.parameters() if parameter not in others]


def set_last_backward(module: nn.Module, stage: int, *, last: bool) -> None:
    """Set whether the next backward pass completes the gradients of the step.

    Before the last pass, stage 1 adds whole gradients and sends nothing. Stages 1 and 2 keep the gathered weights.
    """
    root = cast(FSDPModule, module)
    root.set_is_last_backward(last)
    if stage == 1:
        root.set_requires_gradient_sync(last)
    if stage < 3:
        root.set_reshard_after_backward(last)


def free_gathered(module: nn.Module) -> None:
    """Free the gathered weights. Afterwards the module's parameters are the shards, which the optimizer updates."""
    for unit in units(module):
        unit.reshard()


def _free_without_backward(module: nn.Module, _inputs: object, _output: object) -> None:
    """Free the gathered weights after a forward pass without gradients, because no backward pass will free them."""
    if not torch.is_grad_enabled():
        free_gathered(module)
