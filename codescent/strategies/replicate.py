"""In: a plan's tensors, the dp_replicate axis. Out: data parallelism: every rank holds all, gradients are summed.
Does not shard anything (zero does) and does not touch a gradient itself: `buckets` does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from codescent.plan import DTYPE_BYTES, Collective, Mesh, Plan, Schedule, TensorPlan, Traffic, Verb
from codescent.strategies.strategy import Ask, Gradients, Here

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ReplicateOptions:
    """`bucket_bytes`: gradients are sent in buckets of about this size, while backward runs.
    `reduce_dtype`: "auto" (that of the weights), "fp32" or "bf16" on the wire."""

    bucket_bytes: int
    reduce_dtype: str


def buckets(numels: Sequence[int], bucket_bytes: int, wire_dtype: str) -> list[list[int]]:
    """Indices of tensors of these sizes by bucket, in the order in which backward completes them: last layer first.

    A tensor that is larger than a bucket gets one of its own.
    (Li et al. 2020, "PyTorch Distributed", VLDB 13(12), 3.2.3.)
    """
    filled: list[list[int]] = []
    free_bytes = 0
    for index in reversed(range(len(numels))):
        size_bytes = numels[index] * DTYPE_BYTES[wire_dtype]
        if not filled or size_bytes > free_bytes:
            filled.append([])
            free_bytes = bucket_bytes
        filled[-1].append(index)
        free_bytes -= size_bytes
    return filled


class Replicate:
    """Distributed data parallelism: one all-reduce per bucket of gradients, hidden behind the rest of backward.

    Ranks that share a sequence (cp) hold the same weights too, and each knows its tokens' gradients: they are copies
    like any others.
    """

    axis = "dp_replicate"
    Options = ReplicateOptions
    variants: tuple[Mapping[str, Any], ...] = ({},)

    def __init__(self, options: ReplicateOptions) -> None:
        self.options = options

    def refuse(self, ask: Ask) -> Iterator[str]:
        """Nothing of its own: the batch arithmetic, which it shares with every data-parallel strategy, is build's."""
        yield from ()

    def place(self, tensor: TensorPlan, ask: Ask) -> TensorPlan:
        """Everything stays whole on every rank; sums of micro-batches that travel in another dtype are there twice."""
        wire_dtype = self.wire_dtype(tensor.weight_dtype)
        if ask.mesh.dp_shard > 1 or ask.mesh.degree(copies(ask.mesh)) == 1 or wire_dtype == tensor.gradient_dtype:
            return tensor
        if ask.work.num_microbatches == 1:  # each gradient goes into its bucket as soon as it is there
            return replace(tensor, gradient_dtype=wire_dtype)
        return replace(tensor, bucket_dtype=wire_dtype)

    def wire_dtype(self, weight_dtype: str) -> str:
        """Dtype in which gradients travel."""
        return weight_dtype if self.options.reduce_dtype == "auto" else self.options.reduce_dtype

    def schedule(self, schedule: Schedule, ask: Ask) -> Schedule:
        """REDUCE is there already: a step ends with it on one rank too."""
        return schedule

    def traffic(self, plan: Plan) -> Iterator[Traffic]:
        """One all-reduce per bucket of each stage's gradients. Shards of gradients are zero's to reduce."""
        axis = copies(plan.mesh)
        if plan.mesh.degree(axis) == 1 or plan.mesh.dp_shard > 1:
            return
        dtype = self.wire_dtype(plan.work.precision)
        for stage in range(plan.mesh.pp):
            numels = _numels([tensor for tensor in plan.held_by(stage) if tensor.parameter.trained], plan.mesh)
            for number, bucket in enumerate(buckets(numels, self.options.bucket_bytes, dtype)):
                yield Traffic(
                    collective=Collective.ALL_REDUCE,
                    axis=axis,
                    payload_bytes=sum(numels[index] for index in bucket) * DTYPE_BYTES[dtype],
                    dtype=dtype,
                    verb=Verb.REDUCE,
                    during=plan.schedule.weight_verb,
                    what=f"gradients, bucket {number}",
                    stage=stage if plan.mesh.pp > 1 else None,
                )

    def divide(self, part: torch.nn.Module, here: Here) -> None:
        """The module stays as it is."""

    def gradients(self, parts: Sequence[torch.nn.Module], here: Here) -> Gradients | None:
        """Hooks on the parameters fill the buckets and send them, unless zero divides the gradients."""
        if here.plan.mesh.dp_shard > 1:
            return None
        from codescent.strategies.buckets import BucketedGradients  # noqa: PLC0415 - keeps torch out of planning

        wire_dtype, mesh = self.wire_dtype(here.plan.work.precision), here.plan.mesh
        return BucketedGradients(
            [parameter for part in parts for parameter in part.parameters() if parameter.requires_grad],
            buckets(_numels(here.trained, mesh), self.options.bucket_bytes, wire_dtype),
            wire_dtype,
            here.plan.trained[0].gradient_dtype,
            here.groups.get(copies(mesh)),
        )


def copies(mesh: Mesh) -> str:
    """The axis of the ranks that hold the same and see other tokens."""
    return mesh.joint("dp_replicate", "cp")


def _numels(tensors: Sequence[TensorPlan], mesh: Mesh) -> list[int]:
    return [tensor.gradients.numel(tensor.parameter.shape, mesh) for tensor in tensors]
