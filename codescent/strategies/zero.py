"""In: a plan's tensors and the dp_shard axis. Out: ZeRO: optimizer state, gradients and weights divided over its ranks.
Does not copy whole models (replicate does) and moves no byte itself: torch's fully_shard does, through `shards`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from codescent.plan import DTYPE_BYTES, WIDE, Collective, Placement, Plan, TensorPlan, Traffic, Verb, Work
from codescent.strategies.strategy import SCALARS, Ask, Gradients

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

ROOT = ""
"""The unit of the parameters that belong to no block."""


@dataclass(frozen=True)
class ZeroOptions:
    """`zero_stage`: 1 divides the optimizer's state, 2 gradients too, 3 weights too.
    `reduce_dtype`: "auto" (that of the weights), "fp32" or "bf16" on the wire."""

    zero_stage: int
    reduce_dtype: str


def unit_of(name: str) -> str:
    """What a parameter is gathered and reduced together with: its block ("blocks.3"), or the root."""
    first, _, rest = name.partition(".")
    return f"{first}.{rest.partition('.')[0]}" if first == "blocks" else ROOT


def units(tensors: tuple[TensorPlan, ...], degree: int) -> dict[str, int]:
    """Elements that travel for each unit, root first: every first dim is padded to a multiple of the ranks."""
    numels: dict[str, int] = {ROOT: 0}
    for tensor in tensors:
        rows, *others = tensor.parameter.shape
        padded = replace(tensor.parameter, shape=(-(-rows // degree) * degree, *others))
        unit = unit_of(tensor.parameter.name)
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
        in stage 3; below it they are masters beside the weights that forward and backward read."""
        if ask.mesh.degree(self.axis) == 1:
            return tensor
        shard = Placement({**tensor.optimizer.shards, self.axis: 0})
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

    def traffic(self, plan: Plan) -> Iterator[Traffic]:
        """All-gathers of the weights before they are read, reduce-scatters of the gradients, one set per unit."""
        degree = plan.mesh.degree(self.axis)
        if degree == 1:
            return
        numels = units(plan.tensors, degree)
        last = list(numels)[-1]
        micro = plan.work.num_microbatches
        gathers = micro if self.stage == 3 else 1
        for unit, numel in numels.items():
            yield self._gather(plan, unit, numel, Verb.FORWARD, gathers)
        if self.stage == 3:
            for unit in reversed([unit for unit in numels if unit not in (ROOT, last)]):
                yield self._gather(plan, unit, numels[unit], Verb.BACKWARD, gathers)
        dtype = self.wire_dtype(plan.work)
        for unit, numel in reversed(numels.items()):
            payload_bytes, what = numel * DTYPE_BYTES[dtype], f"gradients of {unit or 'the root'}"
            times = 1 if self.stage == 1 else micro
            yield Traffic(
                Collective.REDUCE_SCATTER, self.axis, payload_bytes, dtype, Verb.BACKWARD, Verb.BACKWARD, what, times
            )
            if plan.mesh.dp_replicate > 1:
                share = payload_bytes // degree
                yield Traffic(
                    Collective.ALL_REDUCE, "dp_replicate", share, dtype, Verb.BACKWARD, Verb.BACKWARD, what, times
                )
        yield Traffic(Collective.ALL_REDUCE, self.axis, SCALARS * 8, "fp64", Verb.REDUCE, None, "loss and wish to stop")
        yield Traffic(Collective.ALL_REDUCE, self.axis, 8, "fp64", Verb.STEP, None, "square of the gradient norm")

    def _gather(self, plan: Plan, unit: str, numel: int, verb: Verb, times: int) -> Traffic:
        dtype = plan.work.precision
        what = f"weights of {unit or 'the root'}"
        return Traffic(Collective.ALL_GATHER, self.axis, numel * DTYPE_BYTES[dtype], dtype, verb, verb, what, times)

    def wire_dtype(self, work: Work) -> str:
        """Dtype in which gradients travel."""
        if self.options.reduce_dtype != "auto":
            return self.options.reduce_dtype
        return WIDE[work.precision] if self._adds_on_the_wire(work) else work.precision

    def _adds_on_the_wire(self, work: Work) -> bool:
        """Whether micro-batches are added before the reduce-scatter: fully_shard does that in the dtype it sends."""
        return work.num_microbatches > 1 and self.stage == 1

    def divide(self, module: torch.nn.Module, groups: dict[str, ProcessGroup], plan: Plan) -> None:
        """Every block, and what is left of the module, becomes a unit of fully_shard."""
        if plan.mesh.degree(self.axis) > 1:
            from codescent.strategies.shards import shard_  # noqa: PLC0415 - keeps torch out of planning

            wire_dtype = self.wire_dtype(plan.work)
            shard_(module, groups, plan, stage=self.stage, wire_dtype=wire_dtype)

    def gradients(self, module: torch.nn.Module, groups: dict[str, ProcessGroup], plan: Plan) -> Gradients | None:
        """Of the shards, where there are any."""
        if plan.mesh.degree(self.axis) == 1:
            return None
        from codescent.strategies.shards import ShardedGradients  # noqa: PLC0415 - keeps torch out of planning

        return ShardedGradients(module, groups, self.stage)
