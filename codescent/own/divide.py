"""In: a module, its optimizer, a mesh. Out: weights, gradients and optimizer state, sharded by torch's fully_shard.
Does not choose blocks and does not average what stays whole (`blocks` and `average` do)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import distribute_tensor as distribute

from codescent.strategies.fully_shard import own_parameters, shard_units_


def divide_(module: nn.Module, blocks: Sequence[nn.Module], stage: int, mesh: DeviceMesh) -> list[nn.Parameter]:
    """Cut parameters along their first dim over the ranks of a mesh row; rows are copies of one another.

    Args:
        module: its parameters, in memory and alike on every rank, become DTensors.
        blocks: gathered one at a time; what is in none of them is gathered with the module.
        stage: of ZeRO. 3 frees a block's gathered weights after its forward; 1 and 2 keep them until backward is done.
        mesh: of one dim, or two: replicas and shards.

    Returns:
        What stays whole on every rank: scalars, and parameters of another dtype than most of their block.
    """
    whole = [p for unit in (module, *blocks) for p in _undivided(own_parameters(unit, blocks))]
    for parameter in module.parameters():
        parameter.data = parameter.data.contiguous()  # fully_shard takes no other, such as channels_last
    freed = [*blocks, module] if stage == 3 else []
    shard_units_(module, blocks, mesh, freed=freed, whole=whole, divisor=float(mesh.size()))
    return whole


def _undivided(parameters: Sequence[nn.Parameter]) -> Iterator[nn.Parameter]:
    """What fully_shard does not take: a scalar has no dim to cut, and what is trained in one unit has one dtype."""
    sizes: Counter[torch.dtype] = Counter()
    for parameter in parameters:
        if parameter.requires_grad and parameter.dim():
            sizes[parameter.dtype] += parameter.numel()
    most = max(sizes, key=lambda dtype: sizes[dtype], default=None)
    for parameter in parameters:
        if not parameter.dim() or (parameter.requires_grad and parameter.dtype != most):
            yield parameter


def hand_over(optimizer: torch.optim.Optimizer, new: Mapping[torch.Tensor, nn.Parameter]) -> None:
    """Put divided parameters in the places of those that an optimizer has, and divide the state that it has of them.

    The dicts of its groups stay the same ones: learning-rate schedulers hold them.
    """
    for group in optimizer.param_groups:
        olds, group["params"] = group["params"], [new.get(old, old) for old in group["params"]]
        for old in olds:
            if old in new and old in optimizer.state:
                state = optimizer.state.pop(old)
                optimizer.state[new[old]] = {name: state_like(new[old], value) for name, value in state.items()}
        if group.get("foreach") is None and len({isinstance(p, DTensor) for p in group["params"]}) > 1:
            group["foreach"] = False  # torch's kernels for many tensors at once take no mixture of divided and whole


def state_like(parameter: torch.Tensor, value: Any) -> Any:
    """A value of an optimizer's state, whole and alike on every rank, divided as its parameter is."""
    if not (isinstance(value, torch.Tensor) and isinstance(parameter, DTensor) and value.dim()):
        return value
    rows = value.shape[0] == parameter.shape[0]  # of a factored state, say, one factor has rows and one has none
    placements = parameter.placements if rows else [Replicate()] * parameter.device_mesh.ndim
    return distribute(value, parameter.device_mesh, placements)
