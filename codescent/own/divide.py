"""In: a module, its optimizer, a mesh. Out: weights, gradients and optimizer state, sharded by torch's fully_shard.
Does not choose blocks (blocks.py), or average gradients of parameters that fully_shard cannot shard (average.py)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import distribute_tensor as distribute

from codescent.strategies.fully_shard import gathers_on_every_path_, own_parameters, send_ourselves, shard_units_


def divide_(module: nn.Module, blocks: Sequence[nn.Module], stage: int, mesh: DeviceMesh) -> list[nn.Parameter]:
    """Shard parameters along their first dim over the ranks of a mesh row; each row of the mesh is a replica.

    Args:
        module: its parameters, which are allocated and equal on every rank, become DTensors.
        blocks: gathered one at a time; parameters outside of all blocks are gathered with the module.
        stage: of ZeRO. 3 frees a block's gathered weights after its forward; 1 and 2 free them after backward.
        mesh: of one dim (shards), or of two (replicas, shards).

    Returns:
        The parameters that stay replicated: scalars, and those whose dtype differs from that of most elements in
        their block.
    """
    whole = [p for unit in (module, *blocks) for p in _undivided(own_parameters(unit, blocks))]
    for parameter in module.parameters():
        parameter.data = parameter.data.contiguous()  # fully_shard refuses other memory formats, such as channels_last
    freed = [*blocks, module] if stage == 3 else []
    shard_units_(module, blocks, mesh, freed=freed, whole=whole, divisor=float(mesh.size()))
    if mesh.device_type == "cpu":  # on a GPU fully_shard sends on streams of its own
        send_ourselves(module)
    gathers_on_every_path_(module)
    return whole


def _undivided(parameters: Sequence[nn.Parameter]) -> Iterator[nn.Parameter]:
    """The parameters that fully_shard cannot shard: scalars have no dim, and trained ones must have one dtype."""
    sizes: Counter[torch.dtype] = Counter()
    for parameter in parameters:
        if parameter.requires_grad and parameter.dim():
            sizes[parameter.dtype] += parameter.numel()
    most = max(sizes, key=lambda dtype: sizes[dtype], default=None)
    for parameter in parameters:
        if not parameter.dim() or (parameter.requires_grad and parameter.dtype != most):
            yield parameter


def hand_over(optimizer: torch.optim.Optimizer, new: Mapping[torch.Tensor, nn.Parameter]) -> None:
    """Replace the parameters of an optimizer by sharded ones, and shard their state.

    The groups' dicts stay the same objects: learning-rate schedulers hold references to them. `new` maps each old
    parameter to its sharded parameter.
    """
    for group in optimizer.param_groups:
        olds, group["params"] = group["params"], [new.get(old, old) for old in group["params"]]
        for old in olds:
            if old in new and old in optimizer.state:
                state = optimizer.state.pop(old)
                optimizer.state[new[old]] = {name: state_like(new[old], value) for name, value in state.items()}
        if group.get("foreach") is None and len({isinstance(p, DTensor) for p in group["params"]}) > 1:
            group["foreach"] = False  # torch's foreach kernels refuse a mixture of DTensors and tensors


def state_like(parameter: torch.Tensor, value: Any) -> Any:
    """Shard a value of optimizer state, equal on every rank, as its parameter is sharded."""
    if not (isinstance(value, torch.Tensor) and isinstance(parameter, DTensor) and value.dim()):
        return value
    rows = value.shape[0] == parameter.shape[0]  # of two factors of a factored state only one has the parameter's rows
    placements = parameter.placements if rows else [Replicate()] * parameter.device_mesh.ndim
    return distribute(value, parameter.device_mesh, placements)
