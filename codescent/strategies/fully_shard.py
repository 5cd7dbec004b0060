"""In: a module, its blocks, a device mesh. Out: both sharded by torch's fully_shard; when it reduces, what it frees.
Does not decide what is sharded, in which format or memory: zero does for our models, `own` for those of users."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard


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
    """Shard every block, then what is left of the module; parameters become DTensors, cut along their first dim.

    Args:
        module: changed in place.
        blocks: parts of it that are gathered one at a time.
        mesh: shards; or replicas and shards.
        freed: units whose gathered weights are freed after their forward pass; others keep them until backward.
        whole: parameters that every rank keeps as they are.
        divisor: gradients are sums over the mesh, divided by this.
    """
    for unit in (*blocks, module):
        fully_shard(unit, mesh=mesh, reshard_after_forward=unit in freed, ignored_params=set(whole), **policies)
    for sharded in units(module):
        # Sums, which every backend can do, then one division: NCCL's mean is not there on CPUs.
        sharded.set_gradient_divide_factor(divisor)
        sharded.set_force_sum_reduction_for_comms(True)
    module.register_forward_hook(_free_without_backward)


def units(module: nn.Module) -> Iterator[FSDPModule]:
    """The module and its blocks; none where nothing is sharded."""
    return (unit for unit in module.modules() if isinstance(unit, FSDPModule))


def own_parameters(unit: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Parameter]:
    """The parameters of a unit that no other block has."""
    others = {parameter for block in blocks if block is not unit for parameter in block.parameters()}
    return [parameter for parameter in unit.parameters() if parameter not in others]


def set_last_backward(module: nn.Module, stage: int, *, last: bool) -> None:
    """Say whether the next backward pass completes the gradients.

    Until then ZeRO's stage 1 adds whole gradients and sends nothing; stages 1 and 2 keep the gathered weights.
    """
    root = cast(FSDPModule, module)
    root.set_is_last_backward(last)
    if stage == 1:
        root.set_requires_gradient_sync(last)
    if stage < 3:
        root.set_reshard_after_backward(last)


def free_gathered(module: nn.Module) -> None:
    """Free gathered weights: from here on the module's parameters are the shards, which optimizers update."""
    for unit in units(module):
        unit.reshard()


def _free_without_backward(module: nn.Module, _inputs: object, _output: object) -> None:
    """Free the gathered weights after a forward pass without gradients: no backward pass will."""
    if not torch.is_grad_enabled():
        free_gathered(module)
