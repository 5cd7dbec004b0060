"""In: a plan's tensors and the dp_shard axis. Out: ZeRO: optimizer state, gradients and weights divided over its ranks.
Does not copy whole models (replicate does) and moves no byte itself: torch's fully_shard does, through `shards`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from codescent.plan import (
    DTYPE_BYTES,
    WIDE,
    Collective,
    Memory,
    Mesh,
    Placement,
    Plan,
    Schedule,
    TensorPlan,
    Traffic,
    Verb,
    Work,
)
from codescent.strategies.replicate import copies
from codescent.strategies.strategy import Ask, Gradients, Here

if TYPE_CHECKING:
    import torch

ROOT = 0
"""The unit of the parameters that belong to no block: the depth of the embedding stands for all of them."""


@dataclass(frozen=True)
class ZeroOptions:
    """`zero_stage`: 1 divides the optimizer's state, 2 gradients too, 3 weights too.
    `reduce_dtype`: "auto" (that of the weights), "fp32" or "bf16" on the wire."""

    zero_stage: int
    reduce_dtype: str


def units(tensors: Sequence[TensorPlan], part: range, mesh: Mesh, num_layers: int) -> dict[int, int]:
    """Elements that travel for each unit of a chunk of the model, root first: the root and each block by its depth.

    Every first dim, of what the axes before have left, is padded to a multiple of the ranks.
    """
    degree = mesh.dp_shard
    numels: dict[int, int] = {ROOT: 0}
    for tensor in tensors:
        depths = [depth for depth in tensor.parameter.depths if depth in part]
        if not depths:
            continue
        placement = tensor.optimizer.without("dp_shard")
        rows, *others = placement.sizes(tensor.parameter.shape, mesh)
        padded = replace(tensor.parameter, shape=(-(-rows // degree) * degree, *others))
        unit = depths[0] if 1 <= depths[0] <= num_layers else ROOT
        numels[unit] = numels.get(unit, 0) + padded.numel
    return numels


class Zero:
    """Rajbhandari et al. 2020, "ZeRO" (SC20): each rank of the axis owns one part of every tensor's first dim.

    Stage 3 is also known as FSDP (Zhao et al. 2023, VLDB 16(12)); with dp_replicate > 1 it is HSDP: shards are
    all-reduced over the copies.
    """

    axis = "dp_shard"
    Options = ZeroOptions
    variants: tuple[Mapping[str, Any], ...] = ({"zero_stage": 1}, {"zero_stage": 2}, {"zero_stage": 3})

    def __init__(self, options: ZeroOptions) -> None:
        self.stage = options.zero_stage
        self.options = options

    def refuse(self, ask: Ask) -> Iterator[str]:
        """A sum of micro-batches in bf16 would lose what a small contribution adds."""
        if ask.mesh.degree(self.axis) > 1 and self._adds_on_the_wire(ask.work) and self.options.reduce_dtype == "bf16":
            yield (
                'parallel.reduce_dtype = "bf16": zero_stage = 1 adds micro-batches in the format in which it sends; '
                'set it to "auto" or "fp32", take zero_stage = 2, or make train.microbatch_size larger'
            )

    def place(self, tensor: TensorPlan, ask: Ask) -> TensorPlan:
        """Shards of the first dim, as torch.chunk cuts it. The wide shards that the optimizer updates are the weights
        in stage 3; below it they are masters beside the weights that forward and backward read. Of what is not trained
        there are only weights: they are divided in stage 3, in their own dtype."""
        if ask.mesh.degree(self.axis) == 1:
            return tensor
        shard = Placement({**tensor.optimizer.shards, self.axis: 0})  # of what the axes before have left
        if not tensor.parameter.trained:
            return replace(tensor, weights=shard, gradients=shard, optimizer=shard) if self.stage == 3 else tensor
        master_dtype = tensor.optimizer_dtype
        if self.stage == 3:
            tensor = replace(tensor, weight_dtype=master_dtype, master_dtype="", weights=shard)
        else:
            tensor = replace(tensor, master_dtype=master_dtype)
        if self._adds_on_the_wire(ask.work):  # the sum of the micro-batches is whole until the last of them
            gradients, gradient_dtype = tensor.gradients, self.wire_dtype(ask.work)
        else:
            gradients, gradient_dtype = shard, master_dtype
        return replace(tensor, gradient_dtype=gradient_dtype, gradients=gradients, optimizer=shard)

    def schedule(self, schedule: Schedule, ask: Ask) -> Schedule:
        """A step is the same list: gathers and reductions belong to FORWARD and BACKWARD."""
        return schedule

    def traffic(self, plan: Plan) -> Iterator[Traffic]:
        """All-gathers of the weights before they are read, reduce-scatters of the gradients, one set per unit."""
        if plan.mesh.degree(self.axis) == 1:
            return
        gathered = [tensor for tensor in plan.tensors if self.axis in tensor.optimizer.shards]
        for stage in range(plan.mesh.pp):
            for chunk, part in enumerate(plan.schedule.parts(stage)):
                yield from self._of_chunk(
                    plan,
                    stage,
                    chunk,
                    self._travelling(gathered, part, plan),
                    self._travelling(plan.trained, part, plan),
                )

    def _travelling(self, tensors: Sequence[TensorPlan], part: range, plan: Plan) -> dict[int, int]:
        """Elements of each unit of a chunk that has any of these tensors."""
        numels = units(tensors, part, plan.mesh, plan.work.num_layers)
        return {unit: numel for unit, numel in numels.items() if numel}

    def _of_chunk(
        self, plan: Plan, stage: int, chunk: int, gathered: dict[int, int], reduced: dict[int, int]
    ) -> Iterator[Traffic]:
        at = stage if plan.mesh.pp > 1 else None
        last = max(gathered, default=ROOT)
        from_host, wide = plan.tensors[0].gathered_from is Memory.HOST, WIDE[plan.work.precision]
        dtype = plan.work.precision
        for unit, numel in gathered.items():
            for verb, times in self._gathers(plan, stage, chunk, freed=unit not in (ROOT, last)).items():
                payload_bytes, what = numel * DTYPE_BYTES[dtype], f"weights of {_named(unit)}"
                yield Traffic(Collective.ALL_GATHER, self.axis, payload_bytes, dtype, verb, verb, what, times, at)
                if from_host:
                    learning = reduced.get(unit, 0)  # in the dtype of the optimizer; the others as they are read
                    whole_bytes = learning * DTYPE_BYTES[wide] + (numel - learning) * DTYPE_BYTES[dtype]
                    part_bytes, what = whole_bytes // plan.mesh.dp_shard, f"{what}, to the device"
                    yield Traffic(Collective.COPY, "", part_bytes, wide, verb, verb, what, times, at)
        dtype, verb = self.wire_dtype(plan.work), Verb.BACKWARD
        times = 1 if self.stage == 1 else plan.work.num_microbatches
        for unit, numel in reversed(reduced.items()):
            payload_bytes, what = numel * DTYPE_BYTES[dtype], f"gradients of {_named(unit)}"
            yield Traffic(Collective.REDUCE_SCATTER, self.axis, payload_bytes, dtype, verb, verb, what, times, at)
            if plan.mesh.degree(copies(plan.mesh)) > 1:
                share, axis = payload_bytes // plan.mesh.dp_shard, copies(plan.mesh)
                yield Traffic(Collective.ALL_REDUCE, axis, share, dtype, verb, verb, what, times, at)
            if from_host:
                part_bytes, what = numel // plan.mesh.dp_shard * DTYPE_BYTES[wide], f"{what}, to the host"
                yield Traffic(Collective.COPY, "", part_bytes, wide, verb, verb, what, times, at)

    def _gathers(self, plan: Plan, stage: int, chunk: int, *, freed: bool) -> dict[Verb, int]:
        """How often a unit's weights are gathered by each verb, going by the stage's instruction list.

        Below stage 3 they are there until the last backward pass. In stage 3 they are freed after each backward pass,
        and where `freed` after each forward pass too.
        """
        gathers: dict[Verb, int] = {}
        there = False
        for instruction in plan.schedule.programs[stage]:
            if instruction.chunk != chunk or instruction.verb not in (Verb.FORWARD, Verb.BACKWARD):
                continue
            if not there:
                gathers[instruction.verb] = gathers.get(instruction.verb, 0) + 1
            forward = instruction.verb is Verb.FORWARD
            there = self.stage < 3 or (forward and not freed)
        return gathers

    def wire_dtype(self, work: Work) -> str:
        """Dtype in which gradients travel."""
        if self.options.reduce_dtype != "auto":
            return self.options.reduce_dtype
        return WIDE[work.precision] if self._adds_on_the_wire(work) else work.precision

    def _adds_on_the_wire(self, work: Work) -> bool:
        """Whether micro-batches are added before the reduce-scatter: fully_shard does that in the dtype it sends."""
        return work.num_microbatches > 1 and self.stage == 1

    def divide(self, part: torch.nn.Module, here: Here) -> None:
        """Every block, and what is left of the chunk, becomes a unit of fully_shard."""
        if here.plan.mesh.degree(self.axis) > 1:
            from codescent.strategies.shards import shard_  # noqa: PLC0415 - keeps torch out of planning

            shard_(part, here, stage=self.stage, wire_dtype=self.wire_dtype(here.plan.work))

    def gradients(self, parts: Sequence[torch.nn.Module], here: Here) -> Gradients | None:
        """Of the shards, where there are any."""
        if here.plan.mesh.degree(self.axis) == 1:
            return None
        from codescent.strategies.shards import ShardedGradients  # noqa: PLC0415 - keeps torch out of planning

        return ShardedGradients(parts, self.stage)


def _named(unit: int) -> str:
    return "the root" if unit == ROOT else f"block {unit - 1}"
