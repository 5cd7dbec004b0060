"""In: a plan's tensors, the ZeRO stage. Out: the same tensors with planned shards over dp_shard: of optimizer state;
of gradients, except in stage 1 with several micro-batches; in stage 3 also of weights.
Does not replicate models (ddp.py does). Does not send data: torch's fully_shard does, called by shards.py."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from codescent.base.refusal import Change, Refusal, each
from codescent.plan import DTYPE_BYTES, WIDE, Collective, Memory, Mesh, Placement, Plan, TensorPlan, Traffic, Verb
from codescent.strategies.ddp import replicas
from codescent.strategies.strategy import Candidate, Gradients, Strategy, ThisRank

if TYPE_CHECKING:
    import torch

ROOT = 0
"""The number of the unit with all parameters outside the blocks. A block's unit has its depth as number."""


def unit_numels(tensors: Sequence[TensorPlan], part: range, mesh: Mesh, num_layers: int) -> dict[int, int]:
    """Elements sent for each unit of a chunk; the root first, then blocks by depth.

    First dims are counted as fully_shard pads them: to a multiple of the ranks of dp_shard.
    Units without elements are left out.
    """
    degree = mesh.dp_shard
    numels: dict[int, int] = {ROOT: 0}
    for tensor in tensors:
        depths = [depth for depth in tensor.parameter.depths if depth in part]
        if not depths:
            continue
        rows, *others = tensor.optimizer.without("dp_shard").sizes(tensor.parameter.shape, mesh)
        padded = -(-rows // degree) * degree
        unit = depths[0] if 1 <= depths[0] <= num_layers else ROOT
        numels[unit] = numels.get(unit, 0) + padded * math.prod(others)
    return {unit: numel for unit, numel in numels.items() if numel}


class Zero(Strategy):
    """Rajbhandari et al. 2020, "ZeRO" (SC20): each rank of the axis owns one shard of every tensor's first dim.

    Stage 3 is also known as FSDP (Zhao et al. 2023, VLDB 16(12)); with dp_replicate > 1 it is HSDP: shards are
    all-reduced over the replicas.
    """

    axis = "dp_shard"
    variants = ({"zero_stage": 1}, {"zero_stage": 2}, {"zero_stage": 3})

    def refuse(self, candidate: Candidate) -> Iterator[str]:
        """Refuse reduce_dtype = "bf16" in stage 1 with several micro-batches: sums in bf16 lose small contributions."""
        narrow = candidate.layout.reduce_dtype == "bf16"
        if narrow and self.active(candidate) and _sums_in_wire_dtype(candidate):
            share, rest = divmod(candidate.work.global_batch_size, candidate.mesh.dp)
            whole = not rest and candidate.whole_samples and candidate.multiple(candidate.mesh) == 1
            yield Refusal(
                'parallel.reduce_dtype = "bf16": zero_stage = 1 adds micro-batches in the format in which it sends',
                [
                    Change({"parallel.reduce_dtype": "fp32"}),
                    Change({"parallel.zero_stage": 2}),
                    *each("train.microbatch_size", [share] if whole else []),
                ],
            )

    def place(self, tensor: TensorPlan, candidate: Candidate) -> TensorPlan:
        """Shard the first dim, as torch.chunk cuts it.

        The optimizer updates shards in its own dtype (fp32 or fp64). In stage 3 these shards are the weights. In stages
        1 and 2 they are master copies of the weights that forward reads. Tensors that are not trained are sharded only
        in stage 3, in their own dtype, and quantized ones never.
        """
        stage = candidate.layout.zero_stage
        shard = Placement({**tensor.optimizer.shards, self.axis: 0})  # in addition to the shards of earlier axes
        if tensor.parameter.quantized:  # fully_shard gathers no numbers of 4 bits: every rank has all of them
            return tensor
        if not tensor.parameter.trained:
            sharded = replace(tensor, weights=shard, gradients=shard, optimizer=shard)
            return sharded if stage == 3 else tensor
        wide = tensor.optimizer_dtype
        if stage == 3:
            tensor = replace(tensor, weight_dtype=wide, master_dtype="", weights=shard)
        else:
            tensor = replace(tensor, master_dtype=wide)
        if _sums_in_wire_dtype(candidate):  # the sum of the micro-batches is whole until the last micro-batch
            return replace(tensor, gradient_dtype=_wire_dtype(candidate), optimizer=shard)
        return replace(tensor, gradient_dtype=wide, gradients=shard, optimizer=shard)

    def traffic(self, plan: Plan, stage: int) -> Iterator[Traffic]:
        """For each unit: all-gathers of weights, reduce-scatters of gradients, their all-reduces over replicas.

        With shards in host memory also the copies between host and device.
        """
        sharded = [tensor for tensor in plan.held_by(stage) if self.axis in tensor.optimizer.shards]
        trained = [tensor for tensor in plan.held_by(stage) if tensor.parameter.trained]
        for chunk, part in enumerate(plan.schedule.parts(stage)):
            gathered, reduced = (
                unit_numels(tensors, part, plan.mesh, plan.model.num_layers) for tensors in (sharded, trained)
            )
            # The root has embedding and head. It is gathered before the first of them, and reduced after it.
            root = part.start if part.start == 0 else part.stop - 1
            for unit, record in (
                *self._gathers(plan, stage, chunk, gathered, reduced),
                *self._reductions(plan, reduced),
            ):
                depth = root if unit == ROOT else unit
                yield replace(record, depths=(depth, depth + 1))

    def _gathers(
        self, plan: Plan, stage: int, chunk: int, gathered: dict[int, int], reduced: dict[int, int]
    ) -> Iterator[tuple[int, Traffic]]:
        """All-gathers of a chunk's units, each with its unit. Shards in host memory are first copied to the device.

        A pass gathers the next unit while one computes. So the first gather of a pass overlaps with nothing. In forward
        this is the first unit. In backward it is the last block, or the root if that was freed.
        """
        narrow, wide = plan.work.precision, WIDE[plan.work.precision]
        last, first = max(gathered, default=ROOT), min(gathered, default=ROOT)
        begins = {Verb.FORWARD: first, Verb.BACKWARD: ROOT if ROOT in gathered else last}
        gathers = {freed: _gathers_by_verb(plan, stage, chunk, freed=freed) for freed in (False, True)}
        for unit, numel in gathered.items():
            for verb, times in gathers[unit not in (ROOT, last)].items():
                payload_bytes, what = numel * DTYPE_BYTES[narrow], f"weights of {_named(unit)}"
                during = None if unit == begins[verb] else verb
                yield (
                    unit,
                    Traffic(Collective.ALL_GATHER, self.axis, payload_bytes, narrow, verb, during, what, times),
                )
                if _from_host(plan):
                    trained = reduced.get(unit, 0)  # copied in the optimizer's dtype, the others as they are read
                    whole_bytes = trained * DTYPE_BYTES[wide] + (numel - trained) * DTYPE_BYTES[narrow]
                    shard_bytes, what = whole_bytes // plan.mesh.dp_shard, f"{what}, to the device"
                    yield unit, Traffic(Collective.COPY, "", shard_bytes, wide, verb, during, what, times)

    def _reductions(self, plan: Plan, reduced: dict[int, int]) -> Iterator[tuple[int, Traffic]]:
        """Per unit of a chunk: a reduce-scatter, an all-reduce of the shards over replicas, a copy to host memory.

        Those of the last unit begin when a backward pass has ended. They overlap with the next micro-batch, and in the
        last one with nothing. (Without streams the all-reduce of the unit before it begins then, too: see overlap.py.)
        """
        times = 1 if plan.layout.zero_stage == 1 else plan.work.num_microbatches
        for unit, numel in reversed(reduced.items()):
            waits = int(unit == min(reduced))
            if times > waits:
                yield from ((unit, sent) for sent in self._reduction(plan, unit, numel, Verb.BACKWARD, times - waits))
            if waits:
                yield from ((unit, sent) for sent in self._reduction(plan, unit, numel, None, waits))

    def _reduction(self, plan: Plan, unit: int, numel: int, during: Verb | None, times: int) -> Iterator[Traffic]:
        dtype, wide, verb, others = _wire_dtype(plan), WIDE[plan.work.precision], Verb.BACKWARD, replicas(plan)
        payload_bytes, what = numel * DTYPE_BYTES[dtype], f"gradients of {_named(unit)}"
        yield Traffic(Collective.REDUCE_SCATTER, self.axis, payload_bytes, dtype, verb, during, what, times)
        if plan.mesh.degree(others) > 1:
            shard_bytes = payload_bytes // plan.mesh.dp_shard
            yield Traffic(Collective.ALL_REDUCE, others, shard_bytes, dtype, verb, during, what, times)
        if _from_host(plan):
            shard_bytes, what = numel // plan.mesh.dp_shard * DTYPE_BYTES[wide], f"{what}, to the host"
            yield Traffic(Collective.COPY, "", shard_bytes, wide, verb, during, what, times)

    def divide(self, part: torch.nn.Module, this_rank: ThisRank) -> None:
        """Shard the part with fully_shard: each block is a unit, and the rest of the part is the root unit."""
        from codescent.strategies.shards import shard_  # noqa: PLC0415 - keeps torch out of planning

        shard_(part, this_rank, wire_dtype=_wire_dtype(this_rank.plan))

    def gradients(
        self, parts: Sequence[torch.nn.Module], this_rank: ThisRank, owner: Gradients | None
    ) -> Gradients | None:
        """`ShardedGradients`, if this strategy shards the run's tensors."""
        if not self.active(this_rank.plan):
            return owner
        from codescent.base.torch_dtypes import TORCH_DTYPE  # noqa: PLC0415 - keeps torch out of planning
        from codescent.strategies.shards import ShardedGradients  # noqa: PLC0415

        sum_dtype = TORCH_DTYPE[this_rank.plan.trained[0].gradient_dtype]
        return ShardedGradients(parts, this_rank.plan.layout.zero_stage, sum_dtype)


def _gathers_by_verb(plan: Plan, stage: int, chunk: int, *, freed: bool) -> dict[Verb, int]:
    """How often each verb gathers a unit's weights, according to the stage's instruction list.

    Stage 3 frees the weights after each backward pass; if `freed`, also after each forward pass.
    """
    gathers: dict[Verb, int] = {}
    gathered = False
    for instruction in plan.schedule.programs[stage]:
        if instruction.chunk != chunk or instruction.verb not in (Verb.FORWARD, Verb.BACKWARD):
            continue
        if not gathered:
            gathers[instruction.verb] = gathers.get(instruction.verb, 0) + 1
        gathered = plan.layout.zero_stage < 3 or (instruction.verb is Verb.FORWARD and not freed)
    return gathers


def _from_host(plan: Plan) -> bool:
    """Whether the shards are in host memory."""
    return plan.tensors[0].gathered_from is Memory.HOST


def _wire_dtype(run: Candidate | Plan) -> str:
    """Dtype in which gradients are sent."""
    if run.layout.reduce_dtype != "auto":
        return run.layout.reduce_dtype
    return WIDE[run.work.precision] if _sums_in_wire_dtype(run) else run.work.precision


def _sums_in_wire_dtype(run: Candidate | Plan) -> bool:
    """Whether fully_shard sums micro-batches before the reduce-scatter, in the dtype in which it sends."""
    return run.work.num_microbatches > 1 and run.layout.zero_stage == 1


def _named(unit: int) -> str:
    return "the root" if unit == ROOT else f"block {unit - 1}"
