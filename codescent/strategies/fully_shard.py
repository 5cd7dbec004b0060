"""In: a module, its blocks, a device mesh. Out: the module, sharded in place by torch's fully_shard, block by block.
Does not choose ZeRO stage, dtype or memory (host or device): shards.py does; for users' modules own/divide.py does."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any, cast

import torch
from torch import nn
from torch.distributed import ProcessGroup, ReduceOp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from codescent.strategies.collectives import all_gather_into, fully_shard_groups, reduce_scatter_into, start_all_gather

DEEPEST = 4
"""How deep the result of a module is searched for tensors: objects in objects."""
_PLAIN = (int, float, str, bytes, type(None))
_PLAIN_ATTRIBUTES = frozenset(vars(nn.Module()))
"""The attributes of a module that hold no results of its forward pass: parameters, submodules, hooks."""


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


def gathers_on_every_path_(module: nn.Module) -> None:
    """Gather a unit's weights before backward reaches any tensor that was computed with them.

    fully_shard gathers them when the gradient of the unit's output arrives, if it finds a tensor in the output. A loss
    that a block keeps aside reaches its weights by another way, and so does a change in place of a view of the output.
    So here the outputs of each submodule with weights of its own do the same.
    """
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")  # whose cause this removes
    sharded = [part for part in module.modules() if isinstance(part, FSDPModule)]
    inside = {part for unit in sharded if unit is not module for part in unit.modules()}
    for unit in sharded:
        outside = inside if unit is module else set[nn.Module]()
        for part in unit.modules():
            holds = any(True for _ in part.parameters(recurse=False))
            if part is unit or (holds and part not in outside):
                part.register_forward_hook(partial(_gather_before_backward, unit))


def not_gathered(module: nn.Module) -> Iterator[tuple[str, bool]]:
    """Names of the units whose whole weights are not there now, and whether they hold weights outside of submodules."""
    for name, unit in module.named_modules():
        own = any(True for _ in unit.parameters(recurse=False))
        if isinstance(unit, FSDPModule) and not all(group.is_unsharded for group in fully_shard_groups(unit)):
            yield name or class_name(cast(nn.Module, unit)), own


def class_name(unit: nn.Module) -> str:
    """The class of a unit, as its author named it: fully_shard derives another one from it."""
    return type(unit).__name__.removeprefix("FSDP")


def _gather_before_backward(unit: FSDPModule, part: nn.Module, _inputs: object, output: object) -> None:
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return
    act = unit._get_fsdp_state()._pre_backward
    kept = [value for name, value in vars(part).items() if name not in _PLAIN_ATTRIBUTES]
    for tensor in {id(tensor): tensor for tensor in differentiable([output, *kept], DEEPEST)}.values():
        tensor.register_hook(act)  # type: ignore[no-untyped-call]


def differentiable(value: Any, depth: int) -> Iterator[torch.Tensor]:
    """The tensors with a gradient function in a value of any type, and the tensors of which they are views."""
    if isinstance(value, torch.Tensor):
        for tensor in (value, value._base):
            if tensor is not None and tensor.grad_fn is not None:
                yield tensor
    elif depth and not isinstance(value, (nn.Module, type, ModuleType, *_PLAIN)):
        parts: list[Any] = [*getattr(value, "__dict__", {}).values()]
        parts += [getattr(value, name, None) for name in _slots(type(value))]
        if isinstance(value, Mapping):
            parts += value.values()
        elif isinstance(value, list | tuple | set | frozenset | deque):
            parts += value
        for part in parts:
            yield from differentiable(part, depth - 1)


def _slots(kind: type) -> Iterator[str]:
    for one in kind.__mro__:
        slots = vars(one).get("__slots__", ())
        yield from (slots,) if isinstance(slots, str) else slots
