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

from codescent.base.torch_dtypes import TORCH_DTYPE
from codescent.plan import WIDE, Memory
from codescent.strategies.overlap import GatherAhead, ReduceBehind, Road, local_gradient
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
    # What is not trained has neither gradients nor state to divide: below stage 3 every rank has it as it is.
    left = {parameter for parameter in module.parameters() if stage < 3 and not parameter.requires_grad}
    for block in blocks:
        # Backward begins with the last block: to free its weights would be to gather them again at once.
        free = stage == 3 and block is not blocks[-1]
        fully_shard(
            block, mesh=mesh, reshard_after_forward=free, mp_policy=policy, offload_policy=place, ignored_params=left
        )
    fully_shard(
        module, mesh=mesh, reshard_after_forward=False, mp_policy=policy, offload_policy=place, ignored_params=left
    )
    for unit in _units(module):
        # Gradients are sums over the global batch (the loss is divided by its tokens before): no mean over ranks.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    _prefetch(module, blocks)
    if not _has_streams():
        _exchange_beside_computation(module, blocks, here, wire_dtype)
    module.register_forward_hook(_free_without_backward)


def _exchange_beside_computation(module: nn.Module, blocks: Sequence[nn.Module], here: Here, wire_dtype: str) -> None:
    """Give every unit the exchanges of overlap.py; the chunk keeps the road of its gradients."""
    others = copies(here.plan.mesh)
    road = Road(here.groups[others] if here.plan.mesh.degree(others) > 1 else None, TORCH_DTYPE[wire_dtype])
    reductions = {}
    # Backward comes to the root last, and before it to the first block: of those that have anything to reduce.
    last = next((unit for unit in (module, *blocks) if _own_parameters(unit, blocks)), module)
    for unit in (module, *blocks):
        reductions[unit] = ReduceBehind(road, last=unit is last)
        cast(FSDPModule, unit).set_custom_all_gather(cast(Any, GatherAhead()))
        cast(FSDPModule, unit).set_custom_reduce_scatter(cast(Any, reductions[unit]))
    cast(Any, module).road, cast(Any, module).reductions = road, reductions


def _own_parameters(unit: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Parameter]:
    """Those that are trained, and that no other unit inside this one has."""
    inside = {parameter for block in blocks if block is not unit for parameter in block.parameters()}
    return [parameter for parameter in unit.parameters() if parameter.requires_grad and parameter not in inside]


def _memory(here: Here, device: str) -> OffloadPolicy:
    """Where the parts are that weights are gathered from: in the host's memory, page-locked, or the device's."""
    if here.tensors[0].gathered_from is Memory.DEVICE:
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=device == "cuda")


def _has_streams() -> bool:
    """Whether fully_shard exchanges on streams of its own, beside the computation."""
    return torch.cuda.is_available() and "nccl" in dist.get_backend()


def _prefetch(module: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """While a unit computes, the weights of the next one are gathered: in forward the block after, in backward the one
    before.

    Left to itself fully_shard goes, in backward, by the order of the forward passes so far. Where a pipeline has
    several under way, the first block's backward is then taken to be followed by the last unit of the pass before,
    whose weights would be gathered in vain. What follows the first block is nothing: it names the root, which is there
    until backward is over.
    """
    forward = [cast(FSDPModule, unit) for unit in (module, *blocks)]
    for unit, following in zip(forward, forward[1:]):
        unit.set_modules_to_forward_prefetch([following])
    backward = [cast(FSDPModule, unit) for unit in (module, *reversed(blocks), module)]
    for unit, following in zip(backward, backward[1:]):
        unit.set_modules_to_backward_prefetch([following])


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
        self.parameters = [p for part in parts for p in part.parameters() if p.requires_grad]
        self.stage = stage
        self.roads: list[Road] = [cast(Any, part).road for part in parts if hasattr(part, "road")]
        for part in parts if self.roads else ():
            reductions: dict[nn.Module, ReduceBehind] = cast(Any, part).reductions
            for unit, reduction in reductions.items():
                reduction.parameters = _own_parameters(unit, list(reductions)[1:])

    def before_backward(self, *, last: bool, chunk: int = 0) -> None:
        """See Gradients."""
        part = self.parts[chunk]
        for road in self.roads:
            road.finish()
        part.set_is_last_backward(last)
        if self.stage == 1:
            part.set_requires_gradient_sync(last)
        if self.stage < 3:
            part.set_reshard_after_backward(last)

    def reduce(self) -> None:
        """See Gradients. Where fully_shard has streams, backward has waited for them already."""
        for road in self.roads:
            road.finish()

    def collect(self) -> Sequence[torch.Tensor]:
        """See Gradients. This rank's shards."""
        arrived = {parameter: gradient for road in self.roads for parameter, gradient in road.sums.items()}
        return [
            arrived[parameter] if parameter in arrived else local_gradient(parameter) for parameter in self.parameters
        ]

    def release(self) -> None:
        """See Gradients."""
        for road in self.roads:
            road.sums.clear()
        for parameter in self.parameters:
            parameter.grad = None

    def close(self) -> None:
        """See Gradients."""
        for road in self.roads:
            road.close()
