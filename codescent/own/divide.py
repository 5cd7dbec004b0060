"""In: a module, its optimizer, a mesh. Out: weights, gradients, optimizer state, divided by torch's fully_shard.
Does not choose blocks and does not average what stays whole (`blocks` and `average` do)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast
from weakref import ref

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import distribute_tensor as distribute

from codescent.own.blocks import own_parameters


class DividedGradients:
    """Parameters cut along their first dim over the ranks of a mesh row; rows are copies of one another.

    Args:
        module: its parameters are in memory, alike on every rank. Their places are taken by DTensors.
        blocks: gathered one at a time; what is in none of them is gathered with the module.
        stage: 3 frees a block's gathered weights after its forward; 1 and 2 keep them until backward is done. 1 adds
            whole gradients while passes are accumulated, 2 and 3 parts of them.

    Attributes:
        whole: parameters that stay whole on every rank: scalars, and those of another dtype than most of their block.
    """

    def __init__(self, module: nn.Module, blocks: Sequence[nn.Module], stage: int, mesh: DeviceMesh) -> None:
        self.stage = stage
        self.whole = [p for unit in (module, *blocks) for p in _undivided(own_parameters(unit, _inside(unit, blocks)))]
        for parameter in module.parameters():
            parameter.data = parameter.data.contiguous()  # fully_shard takes no other, such as channels_last
        for unit in (*blocks, module):
            fully_shard(unit, mesh=mesh, reshard_after_forward=stage == 3, ignored_params=set(self.whole))
        for part in sharded_parts(module):
            # Sums, which every backend can do, then one division: NCCL's mean is not there on CPUs.
            part.set_gradient_divide_factor(float(mesh.size()))
            part.set_force_sum_reduction_for_comms(True)
        self.module = ref(module)
        module.register_forward_hook(_free_without_backward)

    def accumulate(self, on: bool) -> None:
        """Whether more backward passes follow before the gradients are used."""
        module = cast(FSDPModule, self.module())
        module.set_is_last_backward(not on)
        if self.stage == 1:
            module.set_requires_gradient_sync(not on)
        if self.stage < 3:
            module.set_reshard_after_backward(not on)


def _inside(unit: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    return [block for block in blocks if block is not unit and block in set(unit.modules())]


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


def sharded_parts(module: nn.Module) -> Iterator[FSDPModule]:
    """The units of fully_shard; none where nothing is divided."""
    return (part for part in module.modules() if isinstance(part, FSDPModule))


def free_gathered(module: nn.Module) -> None:
    """Free gathered weights: from here on the module's parameters are the divided ones, which optimizers update."""
    for part in sharded_parts(module):
        part.reshard()


def _free_without_backward(module: nn.Module, _inputs: object, _output: object) -> None:
    """What is kept gathered until backward is over would stay so after a forward pass that has none."""
    if not torch.is_grad_enabled():
        free_gathered(module)


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
