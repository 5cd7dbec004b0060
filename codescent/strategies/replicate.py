"""In: a plan's tensors and the dp_replicate axis. Out: data parallelism: every rank holds all, gradients are summed.
Does not shard anything (zero does) and does not touch a gradient itself: `buckets` does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from codescent.plan import DTYPE_BYTES, Collective, Mesh, Plan, TensorPlan, Traffic, Verb
from codescent.strategies.strategy import Applied, Ask

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

SCALARS = 2
"""Sums that travel beside the gradients in each step: the loss, and the wish of a rank to stop."""


@dataclass(frozen=True)
class ReplicateOptions:
    """`bucket_bytes`: gradients are sent in buckets of about this size, while backward runs.
    `reduce_dtype`: "auto" (that of the weights), "fp32" or "bf16" on the wire."""

    bucket_bytes: int
    reduce_dtype: str


def buckets(tensors: Sequence[TensorPlan], bucket_bytes: int, wire_dtype: str) -> list[list[int]]:
    """Indices of `tensors` by bucket, in the order in which backward completes them: last layer first.

    A tensor that is larger than a bucket gets one of its own.
    (Li et al. 2020, "PyTorch Distributed", VLDB 13(12), 3.2.3.)
    """
    filled: list[list[int]] = []
    free_bytes = 0
    for index in reversed(range(len(tensors))):
        size_bytes = tensors[index].parameter.numel * DTYPE_BYTES[wire_dtype]
        if not filled or size_bytes > free_bytes:
            filled.append([])
            free_bytes = bucket_bytes
        filled[-1].append(index)
        free_bytes -= size_bytes
    return filled


class Replicate:
    """Distributed data parallelism: one all-reduce per bucket of gradients, hidden behind the rest of backward."""

    axis = "dp_replicate"
    Options = ReplicateOptions

    def __init__(self, options: ReplicateOptions) -> None:
        self.options = options

    def refuse(self, ask: Ask) -> Iterator[str]:
        """Nothing of its own: the batch arithmetic, which it shares with every data-parallel strategy, is build's."""
        yield from ()

    def place(self, tensor: TensorPlan, mesh: Mesh) -> TensorPlan:
        """Everything stays whole on every rank; gradients that travel in another dtype than theirs are there twice."""
        wire_dtype = self.wire_dtype(tensor.weight_dtype)
        beside = mesh.degree(self.axis) > 1 and wire_dtype != tensor.gradient_dtype
        return replace(tensor, bucket_dtype=wire_dtype if beside else "")

    def wire_dtype(self, weight_dtype: str) -> str:
        """Dtype in which gradients travel."""
        return weight_dtype if self.options.reduce_dtype == "auto" else self.options.reduce_dtype

    def traffic(self, plan: Plan) -> Iterator[Traffic]:
        """One all-reduce per bucket, and one of the step's two scalars."""
        if plan.mesh.degree(self.axis) == 1:
            return
        dtype = self.wire_dtype(plan.work.precision)
        for number, bucket in enumerate(buckets(plan.tensors, self.options.bucket_bytes, dtype)):
            numel = sum(plan.tensors[index].parameter.numel for index in bucket)
            yield Traffic(
                collective=Collective.ALL_REDUCE,
                axis=self.axis,
                payload_bytes=numel * DTYPE_BYTES[dtype],
                dtype=dtype,
                verb=Verb.REDUCE,
                during=Verb.BACKWARD,
                what=f"gradients, bucket {number}",
            )
        yield Traffic(
            Collective.ALL_REDUCE, self.axis, SCALARS * 8, "fp64", Verb.REDUCE, None, "loss and the wish to stop"
        )

    def apply(self, module: torch.nn.Module, groups: dict[str, ProcessGroup], plan: Plan) -> Applied:
        """Hooks on the parameters of `module` fill the buckets and send them; the module itself stays as it is."""
        from codescent.strategies.buckets import BucketedGradients  # noqa: PLC0415 - keeps torch out of planning

        wire_dtype = self.wire_dtype(plan.work.precision)
        return Applied(
            module,
            BucketedGradients(
                list(module.parameters()),
                buckets(plan.tensors, self.options.bucket_bytes, wire_dtype),
                wire_dtype,
                plan.tensors[0].gradient_dtype,
                groups[self.axis],
            ),
        )
