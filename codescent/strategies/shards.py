"""In: a chunk of a model on the meta device. Out: the chunk divided by torch's fully_shard, and its gradients.
Does not decide what is divided (zero does) and does not update weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from codescent.plan import WIDE, Memory
from codescent.strategies.buckets import TORCH_DTYPE
from codescent.strategies.overlap import GatherAhead, ReduceBehind
from codescent.strategies.replicate import copies
from codescent.strategies.strategy import Here


def shard_(module: nn.Module, here: Here, *, stage: int, wire_dtype: str) -> None:
    """Divide the module's parameters over dp_shard, block by block; they become DTensors on their wide dtype.

    Args:
        module: on the meta device; its blocks are in `module.blocks`.
        here: the plan, and this rank of it.
        stage: 3 frees the gathered weights of a block after its forward; 1 and 2 keep them until backward is done.
        wire_dtype: of gradients.
    """
    mesh, precision = _device_mesh(here), here.plan.work.precision
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if precision == "bf16" else None,
        # Where reductions are ours, in the dtype of the shards: of what comes in another one it would copy nothing yet.
        reduce_dtype=TORCH_DTYPE[wire_dtype if _has_streams() else WIDE[precision]],
        cast_forward_inputs=False,  # the model hands over what it computes in
    )
    place = _memory(here, mesh.device_type)
    assert isinstance(module.blocks, nn.ModuleDict)
    blocks = list(module.blocks.values())
    for block in blocks:
        # Backward begins with the last block: to free its weights would be to gather them again at once.
        free = stage == 3 and block is not blocks[-1]
        fully_shard(block, mesh=mesh, reshard_after_forward=free, mp_policy=policy, offload_policy=place)
    fully_shard(module, mesh=mesh, reshard_after_forward=False, mp_policy=policy, offload_policy=place)
    for unit in _units(module):
        # Gradients are sums over the global batch (the loss is divided by its tokens before): no mean over ranks.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    _gather_ahead([module, *blocks])
    if not _has_streams():
        others = copies(here.plan.mesh)
        several = here.plan.mesh.degree(others) > 1
        behind = ReduceBehind(here.groups[others] if several else None, TORCH_DTYPE[wire_dtype])
        for unit in _units(module):
            unit.set_custom_all_gather(cast(Any, GatherAhead()))
            unit.set_custom_reduce_scatter(cast(Any, behind))
        cast(Any, module).behind = behind
    module.register_forward_hook(_free_without_backward)


def _memory(here: Here, device: str) -> OffloadPolicy:
    """Where the parts are that weights are gathered from: in the host's memory, page-locked, or the device's."""
    if here.tensors[0].gathered_from is Memory.DEVICE:
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=device == "cuda")


def _has_streams() -> bool:
    """Whether fully_shard exchanges on streams of its own, beside the computation."""
    return torch.cuda.is_available() and "nccl" in dist.get_backend()


def _gather_ahead(units: Sequence[nn.Module]) -> None:
    """While a unit computes its forward pass, the next one's weights come in; backward does so by itself."""
    for unit, following in zip(units, units[1:]):
        cast(FSDPModule, unit).set_modules_to_forward_prefetch([cast(FSDPModule, following)])


def _free_without_backward(module: nn.Module, _inputs: object, _output: object) -> None:
    """What is kept gathered until backward is over would stay so after a forward pass that has none."""
    if not torch.is_grad_enabled():
        for unit in _units(module):
            unit.reshard()


def _device_mesh(here: Here) -> DeviceMesh:
    """The data-parallel part of the plan's mesh around this rank, on the process groups that there are."""
    mesh, shard, others = here.plan.mesh, here.groups["dp_shard"], copies(here.plan.mesh)
    device = "cuda" if _has_streams() else "cpu"
    if mesh.degree(others) == 1 or not _has_streams():
        return DeviceMesh.from_group(shard, device, mesh_dim_names=("dp_shard",))
    ranks = [mesh.group("dp_shard", copy) for copy in mesh.group(others, here.rank)]
    return DeviceMesh.from_group(
        [here.groups[others], shard], device, mesh=torch.tensor(ranks), mesh_dim_names=("copies", "dp_shard")
    )


def _units(module: nn.Module) -> Iterator[FSDPModule]:
    return (unit for unit in module.modules() if isinstance(unit, FSDPModule))


class ShardedGradients:
    """Gradients that fully_shard reduces while backward runs. See Gradients.

    Args:
        parts: as `shard_` has left them, their parameters in memory.
        stage: 1 reduces the sum of all micro-batches once; 2 and 3 reduce each and add the shards.
    """

    def __init__(self, parts: Sequence[nn.Module], stage: int) -> None:
        self.parts = [cast(FSDPModule, part) for part in parts]
        self.parameters = [parameter for part in parts for parameter in part.parameters()]
        self.behind: list[ReduceBehind] = [cast(Any, part).behind for part in parts if hasattr(part, "behind")]
        self.stage = stage
        self.sums: dict[int, torch.Tensor] = {}

    def before_backward(self, *, last: bool, chunk: int = 0) -> None:
        """See Gradients."""
        part = self.parts[chunk]
        if self.stage > 1:
            self._take()
        part.set_is_last_backward(last)
        if self.stage == 1:
            part.set_requires_gradient_sync(last)
        if self.stage < 3:
            part.set_reshard_after_backward(last)

    def _take(self) -> None:
        """The shards of the backward passes so far, out of reach of the next one: it must not add to what is under way.

        Where fully_shard has streams it adds by itself, in their order.
        """
        for behind in self.behind:
            behind.finish()
        for index, parameter in enumerate(self.parameters if self.behind else ()):
            if parameter.grad is not None:
                found = _local(parameter)
                self.sums[index] = self.sums[index].add_(found) if index in self.sums else found
                parameter.grad = None

    def reduce(self) -> None:
        """See Gradients."""
        self._take()

    def collect(self) -> Sequence[torch.Tensor]:
        """See Gradients. This rank's shards."""
        return [
            self.sums[index] if index in self.sums else _local(parameter)
            for index, parameter in enumerate(self.parameters)
        ]

    def release(self) -> None:
        """See Gradients."""
        self.sums.clear()
        for parameter in self.parameters:
            parameter.grad = None

    def close(self) -> None:
        """See Gradients."""
        for behind in self.behind:
            behind.close()


def _local(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of the gradient; zeros where the parameter took no part in the loss."""
    assert isinstance(parameter, DTensor)
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros_like(parameter.to_local())
    assert isinstance(gradient, DTensor)
    return gradient.to_local()
