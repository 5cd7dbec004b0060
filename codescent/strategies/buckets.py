"""In: parameters, which of them travel together, a process group. Out: summed gradients, sent while backward runs.
Does not decide the buckets (replicate does) and does not update weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from codescent.base.torch_dtypes import TORCH_DTYPE


class BucketedGradients:
    """Gradients of replicated parameters: accumulated over micro-batches, all-reduced bucket by bucket.

    A hook on each parameter fires when autograd has added its last contribution; on the last backward of a step it
    copies the gradient into its place in the bucket, and a full bucket leaves at once. Buckets leave in one order on
    every rank, whatever the order in which they fill: a process group matches collectives by their sequence.

    Args:
        parameters: the trainable parameters, in the plan's order.
        buckets: indices into `parameters`, in the order in which backward completes them.
        wire_dtype: dtype of the buckets.
        kept_dtype: dtype in which contributions of micro-batches are added; where it is not the parameters' own
            (bf16 weights, several micro-batches), sums are kept here and not in `.grad`: in the buckets, if theirs.
        group: ranks to sum over; with one rank, or None, nothing is copied and nothing is sent.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        buckets: Sequence[Sequence[int]],
        wire_dtype: str,
        kept_dtype: str,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.parameters = list(parameters)
        self.buckets = [list(bucket) for bucket in buckets]
        self.bucket_of = {index: number for number, bucket in enumerate(self.buckets) for index in bucket}
        self.group = group
        self.alone = group is None or group.size() == 1
        self.wire_dtype = TORCH_DTYPE[wire_dtype]
        self.kept_dtype = TORCH_DTYPE[kept_dtype]
        self.in_place = not self.alone and wire_dtype == kept_dtype
        self.last = False
        self.sums: dict[int, torch.Tensor] = {}
        self.complete: dict[int, torch.Tensor] = {}
        self.views: list[torch.Tensor] = []
        self.buffers: list[torch.Tensor] = []
        self.missing = [len(bucket) for bucket in self.buckets]
        self.next_bucket = 0
        self.works: list[Any] = []
        if not self.alone:
            self._allocate()
        self.hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook(index))  # type: ignore[no-untyped-call]
            for index, parameter in enumerate(self.parameters)
        ]

    def _allocate(self) -> None:
        views: dict[int, torch.Tensor] = {}
        for bucket in self.buckets:
            sizes = [self.parameters[index].numel() for index in bucket]
            buffer = torch.empty(sum(sizes), dtype=self.wire_dtype, device=self.parameters[bucket[0]].device)
            self.buffers.append(buffer)
            for index, part in zip(bucket, torch.split(buffer, sizes), strict=True):
                views[index] = part.view_as(self.parameters[index])
        self.views = [views[index] for index in range(len(self.parameters))]

    def _hook(self, index: int) -> Any:
        def arrived(parameter: torch.Tensor) -> None:
            gradient = parameter.grad
            assert gradient is not None
            if gradient.dtype != self.kept_dtype:
                gradient = self._add(index, gradient)
                parameter.grad = None
            elif self.in_place and gradient is not self.views[index]:
                # From here on autograd adds the other micro-batches' gradients in the bucket itself.
                parameter.grad = gradient = self.views[index].copy_(gradient)
            if self.last:
                parameter.grad = None
                self._completed(index, gradient)

        return arrived

    def _add(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        """The sum so far, in a wider dtype than the gradients': a bf16 sum would lose small contributions."""
        if index in self.sums:
            return self.sums[index].add_(gradient)
        self.sums[index] = self.views[index].copy_(gradient) if self.in_place else gradient.to(self.kept_dtype)
        return self.sums[index]

    def _completed(self, index: int, gradient: torch.Tensor) -> None:
        if self.alone:
            self.complete[index] = gradient
            return
        view = self.views[index]
        self.complete[index] = view if gradient is view else view.copy_(gradient)
        self.missing[self.bucket_of[index]] -= 1
        while self.next_bucket < len(self.buckets) and self.missing[self.next_bucket] == 0:
            self.works.append(dist.all_reduce(self.buffers[self.next_bucket], group=self.group, async_op=True))
            self.next_bucket += 1

    def before_backward(self, *, last: bool, chunk: int = 0) -> None:
        """See Gradients. Only the chunk's own parameters have hooks that fire."""
        self.last = last

    def reduce(self) -> None:
        """See Gradients. A parameter that took no part in the loss has a gradient of zero."""
        for index, parameter in enumerate(self.parameters):
            if index not in self.complete:
                seen = self.sums.get(index, parameter.grad)
                parameter.grad = None
                self._completed(index, torch.zeros_like(parameter) if seen is None else seen)
        for work in self.works:
            work.wait()
        self.works.clear()

    def collect(self) -> Sequence[torch.Tensor]:
        """See Gradients."""
        return [self.complete[index] for index in range(len(self.parameters))]

    def release(self) -> None:
        """See Gradients. Buckets are kept for the next step."""
        self.complete.clear()
        self.sums.clear()
        self.missing = [len(bucket) for bucket in self.buckets]
        self.next_bucket = 0

    def close(self) -> None:
        """See Gradients. A group that outlives its destruction has threads that the end of the process trips over."""
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()
        self.works.clear()
        self.group = None
