"""In: a plan's tensors and the dp_replicate axis. Out: data parallelism: every rank holds all, gradients are summed.
Does not shard anything (zero does) and does not touch a gradient itself: `buckets` does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from codescent.plan import DTYPE_BYTES, Collective, Plan, TensorPlan, Traffic, Verb
from codescent.strategies.strategy import SCALARS, Ask, Gradients

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup


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
    variants: tuple[Mapping[str, Any], ...] = ({},)

    def __init__(self, options: ReplicateOptions) -> None:
        self.options = options

    def refuse(self, ask: Ask) -> Iterator[str]:
        """Nothing of its own: the batch arithmetic, which it shares with every data-parallel strategy, is build's."""
        yield from ()

    def place(self, tensor: TensorPlan, ask: Ask) -> TensorPlan:
        """Everything stays whole on every rank; gradients that travel in another dtype than theirs are there twice."""
        if ask.mesh.dp_shard > 1:
            return tensor
        wire_dtype = self.wire_dtype(tensor.weight_dtype)
        beside = ask.mesh.degree(self.axis) > 1 and wire_dtype != tensor.gradient_dtype
        return replace(tensor, bucket_dtype=wire_dtype if beside else "")

    def wire_dtype(self, weight_dtype: str) -> str:
        """Dtype in which gradients travel."""
        return weight_dtype if self.options.reduce_dtype == "auto" else self.options.reduce_dtype

    def traffic(self, plan: Plan) -> Iterator[Traffic]:
        """One all-reduce per bucket, and one of the step's two scalars. Shards of gradients are zero's to reduce."""
        if plan.mesh.degree(self.axis) == 1:
            return
        dtype = self.wire_dtype(plan.work.precision)
        whole = plan.tensors if plan.mesh.dp_shard == 1 else ()
        for number, bucket in enumerate(buckets(whole, self.options.bucket_bytes, dtype)):
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
        yield Traffic(Collective.ALL_REDUCE, self.axis, SCALARS * 8, "fp64", Verb.REDUCE, None, "loss and wish to stop")

    def divide(self, module: torch.nn.Module, groups: dict[str, ProcessGroup], plan: Plan) -> None:
        """The module stays as it is."""

    def gradients(self, module: torch.nn.Module, groups: dict[str, ProcessGroup], plan: Plan) -> Gradients | None:
        """Hooks on the parameters of `module` fill the buckets and send them; None where gradients are sharded."""
        if plan.mesh.dp_shard > 1:
            return None
        from codescent.strategies.buckets import BucketedGradients  # noqa: PLC0415 - keeps torch out of planning

        wire_dtype = self.wire_dtype(plan.work.precision)
        return BucketedGradients(
            list(module.parameters()),
            buckets(plan.tensors, self.options.bucket_bytes, wire_dtype),
            wire_dtype,
            plan.tensors[0].gradient_dtype,
            groups[self.axis],
        )
