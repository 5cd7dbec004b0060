"""In: a chunk of a model on the meta device. Out: the chunk, its parameters sharded over dp_shard, still without
memory; later `ShardedGradients`, the object that reduces the chunk's gradients.
Does not decide what is sharded (zero does) and does not update weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy

from codescent.base.device import found_kind
from codescent.base.device_kinds import CPU, kind_of
from codescent.base.dtensors import is_dtensor
from codescent.base.torch_dtypes import TORCH_DTYPE
from codescent.plan import WIDE, Memory
from codescent.strategies.collectives import count_fully_shard_waits
from codescent.strategies.ddp import replicas
from codescent.strategies.fully_shard import own_parameters, set_last_backward, shard_units_, units
from codescent.strategies.overlap import AsyncAllGather, AsyncReduceScatter, GradientsInFlight, local_gradient
from codescent.strategies.strategy import Held, ThisRank


def shard_(module: nn.Module, this_rank: ThisRank, *, wire_dtype: str) -> None:
    """Shard a module's parameters over dp_shard, block by block. They become DTensors.

    The module is on the meta device. Gradients are sent in `wire_dtype`.
    """
    precision, stage = this_rank.plan.work.precision, this_rank.plan.layout.zero_stage
    mesh = _device_mesh(this_rank)
    quantized = {tensor.parameter.name for tensor in this_rank.tensors if tensor.parameter.quantized}
    assert isinstance(module.blocks, nn.ModuleDict)
    blocks = list(module.blocks.values())
    shard_units_(
        module,
        blocks,
        mesh,
        # Backward begins with the last block. If its weights were freed, they would be gathered again at once.
        freed=blocks[:-1] if stage == 3 else (),
        # Below stage 3 parameters that are not trained stay whole: they have no gradients or optimizer state to shard.
        whole=[
            parameter
            for name, parameter in module.named_parameters()
            if not parameter.requires_grad and (stage < 3 or name in quantized)
        ],
        divisor=1.0,  # gradients are sums: the loss is already divided by the tokens of the global batch
        mp_policy=MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if precision == "bf16" else None,
            # Without streams, overlap.py reduces, into the dtype of the shards. With another dtype fully_shard would
            # convert the gradients before they have arrived.
            reduce_dtype=TORCH_DTYPE[wire_dtype if _has_streams() else WIDE[precision]],
            cast_forward_inputs=False,  # the model's activations have the right dtype already
        ),
        offload_policy=_offload(this_rank, mesh.device_type),
    )
    _prefetch(module, blocks)
    if _has_streams():
        for unit in units(module):
            count_fully_shard_waits(unit)
    else:
        _overlap(module, blocks, this_rank, wire_dtype)


def _overlap(module: nn.Module, blocks: Sequence[nn.Module], this_rank: ThisRank, wire_dtype: str) -> None:
    """Set the asynchronous collectives of overlap.py on every unit. Save their state as attributes of the module."""
    others = replicas(this_rank.plan)
    group = this_rank.groups[others] if this_rank.plan.mesh.degree(others) > 1 else None
    in_flight, reductions = GradientsInFlight(group, TORCH_DTYPE[wire_dtype]), {}
    # The unit that backward reaches last: the root, else the first block, if it has parameters that are trained.
    last = next((unit for unit in (module, *blocks) if _trained(unit, blocks)), module)
    for unit in (module, *blocks):
        reductions[unit] = AsyncReduceScatter(in_flight, last=unit is last)
        cast(FSDPModule, unit).set_custom_all_gather(cast(Any, AsyncAllGather(in_flight.gathers)))
        cast(FSDPModule, unit).set_custom_reduce_scatter(cast(Any, reductions[unit]))
    cast(Any, module).in_flight, cast(Any, module).reductions = in_flight, reductions


def _trained(unit: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Parameter]:
    """The trained parameters of a unit, without those of its blocks."""
    return [parameter for parameter in own_parameters(unit, blocks) if parameter.requires_grad]


def _offload(this_rank: ThisRank, device: str) -> OffloadPolicy:
    """Policy for shards in device memory, or in host memory (page-locked where there is such)."""
    if this_rank.tensors[0].gathered_from is Memory.DEVICE:
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=kind_of(device).pins)


def _has_streams() -> bool:
    """Whether fully_shard communicates on its own streams, in parallel with the computation."""
    return _streaming_kind() != CPU


def _streaming_kind() -> str:
    """The kind of device whose backend is that of the ranks, if it has streams; else "cpu"."""
    kind = kind_of(found_kind())
    return kind.name if kind.streams and kind.backend in dist.get_backend() else CPU


def _prefetch(module: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Gather the next unit's weights while a unit computes: the next block in forward, the previous one in backward.

    By default, fully_shard prefetches in backward by the order of all forward passes so far. With several micro-batches
    of a pipeline in flight, it would gather useless weights after the first block. Here the root is next, whose weights
    are already gathered.
    """
    forward = [cast(FSDPModule, unit) for unit in (module, *blocks)]
    for unit, following in zip(forward, forward[1:]):
        unit.set_modules_to_forward_prefetch([following])
    backward = [cast(FSDPModule, unit) for unit in (module, *reversed(blocks), module)]
    for unit, following in zip(backward, backward[1:]):
        unit.set_modules_to_backward_prefetch([following])


def _device_mesh(this_rank: ThisRank) -> DeviceMesh:
    """The device mesh of this rank's data-parallel axes, built from the existing process groups."""
    mesh, shard, others = this_rank.plan.mesh, this_rank.groups["dp_shard"], replicas(this_rank.plan)
    device = _streaming_kind()
    if mesh.degree(others) == 1 or device == CPU:
        return DeviceMesh.from_group(shard, device, mesh_dim_names=("dp_shard",))
    ranks = [mesh.group("dp_shard", replica) for replica in mesh.group(others, this_rank.rank)]
    return DeviceMesh.from_group(
        [this_rank.groups[others], shard], device, mesh=torch.tensor(ranks), mesh_dim_names=("replicas", "dp_shard")
    )


class ShardedGradients:
    """Gradients that fully_shard reduces while backward runs: in stage 1 once per step, else for each micro-batch.

    `parts` were sharded by `shard_`, and their parameters have memory. Stage 1 adds micro-batches in `sum_dtype`.
    """

    def __init__(self, parts: Sequence[nn.Module], stage: int, sum_dtype: torch.dtype) -> None:
        self.parts, self.stage, self.sum_dtype = list(parts), stage, sum_dtype
        self.added: set[int] = set()  # chunks whose micro-batches are being added, in stage 1
        self.parameters = [p for part in parts for p in part.parameters() if p.requires_grad]
        places = {id(parameter): number for number, parameter in enumerate(self.parameters)}
        overlapping = [cast(Any, part) for part in parts if hasattr(part, "in_flight")]
        self.in_flight: list[GradientsInFlight] = [part.in_flight for part in overlapping]
        for part in overlapping:
            for unit, reduction in part.reductions.items():
                reduction.parameters = _trained(unit, list(part.reductions)[1:])
                reduction.indices = [places[id(parameter)] for parameter in reduction.parameters]

    def before_backward(self, *, last: bool, chunk: int = 0, step: int = 0) -> None:
        """See Gradients."""
        self.reduce()
        for one in self.in_flight:
            one.own.begin(step)
        if self.stage == 1:
            (self.added.discard if last else self.added.add)(chunk)
        set_last_backward(self.parts[chunk], self.stage, last=last)

    def reduce(self) -> None:
        """See Gradients. If fully_shard has streams, there is nothing to do: backward has waited for them."""
        for one in self.in_flight:
            one.finish()

    def collect(self) -> Sequence[torch.Tensor]:
        """See Gradients. This rank's shards."""
        sums = {parameter: gradient for one in self.in_flight for parameter, gradient in one.sums.items()}
        return [sums[parameter] if parameter in sums else local_gradient(parameter) for parameter in self.parameters]

    def not_finite(self, step: int) -> Sequence[int] | None:
        """See Gradients. Known of whole units; with streams only fully_shard sees the gradients before their sum."""
        return sorted({index for one in self.in_flight for index in one.own.not_finite(step)})

    def release(self) -> None:
        """See Gradients."""
        for one in self.in_flight:
            one.sums.clear()
        for parameter in self.parameters:
            parameter.grad = None
        self.added.clear()

    def state(self) -> Mapping[str, torch.Tensor]:
        """See Gradients."""
        return {}

    def held(self) -> Held:
        """See Gradients.

        In stage 1 fully_shard adds the micro-batches before it sends them. If it adds in another dtype than that of
        backward, no public call reaches these sums: their bytes are those of their shapes.
        """
        found, coming = Held(), set[nn.Parameter]()
        for one in self.in_flight:
            found.gradients += one.sums.values()
            for reduction in one.reductions:
                found.buffers += (reduction.whole, reduction.wire, reduction.shard, *reduction.reduce_scatter.received)
                coming.update(reduction.parameters)  # fully_shard has set `.grad`, but it has no values yet
            found.buffers += one.gathers
        found.gradients += [local_gradient(p) for p in self.parameters if p.grad is not None and p not in coming]
        for number, part in enumerate(self.parts):
            gathered = [p for p in part.parameters() if p.requires_grad and not is_dtensor(p)]
            whole = [p.grad for p in gathered if p.grad is not None]
            (found.gradients if self.stage == 1 else found.buffers).extend(whole)
            if number in self.added:
                numel = sum(p.numel() for p in gathered if p.grad is None and p.dtype != self.sum_dtype)
                found.unseen_bytes += numel * self.sum_dtype.itemsize
        return found

    def close(self) -> None:
        """See Gradients."""
        for one in self.in_flight:
            one.close()
