"""In: a plan's tensors. Out: distributed data parallelism: gradients all-reduced in buckets over dp_replicate and cp.
Does not shard (zero does) or update weights. Does not import torch at the top, because planning imports this file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from codescent.base.refusal import Change, Refusal
from codescent.plan import (
    DTYPE_BYTES,
    WIDE,
    Collective,
    KeptTensor,
    Layout,
    Mesh,
    Plan,
    Scalar,
    TensorPlan,
    Traffic,
    Verb,
)
from codescent.plan.wire import Wire, kept_name
from codescent.strategies.decides import compression_of, keys_of
from codescent.strategies.strategy import Candidate, Gradients, Held, Strategy, ThisRank

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from codescent.strategies.own_sums import OwnSums
    from codescent.strategies.wire_buckets import CompressedBuckets


def replicas(run: Candidate | Plan) -> str:
    """The axis of the ranks that hold the same weights and read different tokens."""
    return "cp" if run.layout.apart or run.layout.served else run.mesh.joint("dp_replicate", "cp")


def buckets(numels: Sequence[int], bucket_bytes: int, wire_dtype: str) -> list[list[int]]:
    """Group tensors into buckets: lists of indices in `numels`, in the order of backward (last layer first).

    A tensor larger than a bucket gets its own bucket (Li et al. 2020, "PyTorch Distributed", VLDB 13(12), 3.2.3).
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


class DDP(Strategy):
    """Distributed data parallelism: one all-reduce per bucket of gradients, during the rest of backward.

    Ranks that share a sequence (cp) are replicas, too. If zero shards the gradients, zero also reduces them.
    """

    axis = "dp_replicate"
    variants = ({},)

    def active(self, run: Candidate | Plan) -> bool:
        """True if there are replicas, and zero does not reduce their gradients."""
        return run.mesh.degree(replicas(run)) > 1 and run.mesh.dp_shard == 1

    def refuse(self, candidate: Candidate) -> Iterator[str]:
        """Refuse a `wire` that has no gradients to send, or not all of them."""
        layout, mesh = candidate.layout, candidate.mesh
        if layout.wire == "none" or layout.apart or layout.servers:
            return
        without, given = Change({"parallel.wire": "none"}), f'parallel.wire = "{layout.wire}"'
        if layout.reduce_dtype != "auto":
            said = f'{given}: parallel.reduce_dtype = "{layout.reduce_dtype}" is another format of the same messages'
            yield Refusal(said, [Change({"parallel.reduce_dtype": "auto"}), without])
        if mesh.degree(replicas(candidate)) == 1 and candidate.world_size > 1:
            yield Refusal(
                f"{given}: sends gradients along parallel.dp_replicate, which is 1; activations, and what travels "
                "along dp_shard, tp and pp, have the format of train.precision",
                [without],
            )
        elif mesh.dp_shard > 1:
            said = f"{given}: with parallel.dp_shard = {mesh.dp_shard} torch's fully_shard sums the gradients"
            yield Refusal(said, [without])

    def place(self, tensor: TensorPlan, candidate: Candidate) -> TensorPlan:
        """Add a second copy of the gradients if their sums over micro-batches and their messages differ in dtype."""
        wire_dtype = _wire_dtype(candidate.layout, tensor.weight_dtype)
        if wire_dtype == tensor.gradient_dtype:
            return tensor
        if candidate.work.num_microbatches == 1:
            return replace(tensor, gradient_dtype=wire_dtype)
        return replace(tensor, bucket_dtype=wire_dtype)

    def traffic(self, plan: Plan, stage: int) -> Iterator[Traffic]:
        """One all-reduce per bucket of the stage's gradients. Only the last bucket overlaps with nothing: its last
        gradient is that of the stage's first layer, with which backward ends."""
        dtype = _wire_dtype(plan.layout, plan.work.precision)
        trained = [tensor for tensor in plan.held_by(stage) if tensor.parameter.trained]
        numels = _numels(trained, plan.mesh)
        here = {depth for part in plan.schedule.parts(stage) for depth in part}
        filled, axis = buckets(numels, plan.layout.bucket_bytes, dtype), replicas(plan)
        wire, since = _wire(plan), plan.layout.wire_from
        for number, bucket in enumerate(filled, 1):
            payload_bytes = sum(numels[index] for index in bucket) * DTYPE_BYTES[dtype]
            during = None if number == len(filled) else plan.schedule.weight_verb
            what = f"gradients, bucket {number - 1}"
            reads = {depth for index in bucket for depth in trained[index].parameter.depths if depth in here}
            depths = min(reads), max(reads) + 1
            if wire is None or since:
                until = None if wire is None else since
                options: dict[str, Any] = {"until": until, "depths": depths}
                yield Traffic(Collective.ALL_REDUCE, axis, payload_bytes, dtype, Verb.REDUCE, during, what, **options)
            if wire is not None:
                shapes = _shapes(plan, stage, bucket)
                for sent in wire.collectives(shapes, dtype, plan.mesh.degree(axis)):
                    yield replace(sent.traffic(axis, Verb.REDUCE, during, what), since=since, depths=depths)

    def kept(self, plan: Plan, stage: int) -> Iterator[KeptTensor]:
        """What the compression of each bucket keeps: see `Wire.state`."""
        wire, dtype = _wire(plan), _wire_dtype(plan.layout, plan.work.precision)
        if wire is None:
            return
        numels = _numels([tensor for tensor in plan.held_by(stage) if tensor.parameter.trained], plan.mesh)
        for number, bucket in enumerate(buckets(numels, plan.layout.bucket_bytes, dtype)):
            for state in wire.state(_shapes(plan, stage, bucket), dtype, plan.mesh.degree(replicas(plan))):
                yield KeptTensor(kept_name(number, state.name), state.shape, state.dtype)

    def decides(self, plan: Plan) -> dict[str, Scalar]:
        """A lossy format of gradients, and the buckets that are rounded together."""
        if plan.layout.apart or plan.layout.served:
            return {}
        compression = compression_of(plan)
        return compression | (keys_of(plan, "bucket_bytes") if compression else {})

    def exact(self, plan: Plan) -> bool:
        """False if the format of messages loses anything."""
        wire = _wire(plan)
        shapes = [tensor.gradients.sizes(tensor.parameter.shape, plan.mesh) for tensor in plan.trained]
        return wire is None or wire.exact_for(shapes)

    def gradients(
        self, parts: Sequence[torch.nn.Module], this_rank: ThisRank, owner: Gradients | None
    ) -> Gradients | None:
        """`BucketedGradients`, unless an earlier strategy already handles the gradients."""
        plan = this_rank.plan
        if owner is not None:
            return owner
        from codescent.base.torch_dtypes import TORCH_DTYPE  # noqa: PLC0415 - keeps torch out of planning

        wire_dtype = _wire_dtype(plan.layout, plan.work.precision)
        parameters = [parameter for part in parts for parameter in part.parameters() if parameter.requires_grad]
        filled = buckets(_numels(this_rank.trained, plan.mesh), plan.layout.bucket_bytes, wire_dtype)
        return BucketedGradients(
            parameters,
            filled,
            TORCH_DTYPE[wire_dtype],
            TORCH_DTYPE[plan.trained[0].gradient_dtype],
            this_rank.groups[replicas(plan)] if self.active(plan) else None,
            self._compressed(this_rank, parameters, filled, wire_dtype),
        )

    def _compressed(
        self, this_rank: ThisRank, parameters: Sequence[torch.nn.Parameter], filled: list[list[int]], dtype: str
    ) -> CompressedBuckets | None:
        """The sums of the buckets in the format of parallel.wire; None: they are plain all-reduces."""
        plan = this_rank.plan
        wire = _wire(plan)
        if wire is None or not parameters or not self.active(plan):
            return None
        from codescent.strategies.wire_buckets import CompressedBuckets  # noqa: PLC0415 - needs torch

        shapes = [[tuple(parameters[index].shape) for index in bucket] for bucket in filled]
        group, device = this_rank.groups[replicas(plan)], parameters[0].device
        return CompressedBuckets(wire, shapes, group, device, dtype, plan.layout.wire_from)


def _wire(plan: Plan) -> Wire | None:
    """How gradients travel; None: in plain all-reduces."""
    wire = Wire.parse(plan.layout.wire)
    return None if plan.layout.apart or plan.layout.served or wire.method == "none" else wire


def _shapes(plan: Plan, stage: int, bucket: Sequence[int]) -> list[tuple[int, ...]]:
    """The shapes of the gradients of a bucket on the largest rank."""
    tensors = [tensor for tensor in plan.held_by(stage) if tensor.parameter.trained]
    return [tensors[index].gradients.sizes(tensors[index].parameter.shape, plan.mesh) for index in bucket]


def _wire_dtype(layout: Layout, weight_dtype: str) -> str:
    """Dtype of the buckets: that in which gradients are sent, or in which parallel.wire sums them."""
    if layout.wire != "none" and not (layout.apart or layout.served):
        return WIDE[weight_dtype]
    return weight_dtype if layout.reduce_dtype == "auto" else layout.reduce_dtype


def _numels(tensors: Sequence[TensorPlan], mesh: Mesh) -> list[int]:
    return [tensor.gradients.numel(tensor.parameter.shape, mesh) for tensor in tensors]


class BucketedGradients:
    """Gradients of replicated parameters: accumulated over micro-batches, all-reduced bucket by bucket.

    A hook on each parameter runs when autograd has completed the parameter's gradient. In the last backward of a step
    it copies the gradient into the bucket. A full bucket is sent at once. Every rank sends its buckets in the same
    order, even if they fill in another order: a process group matches collectives by their sequence.

    Args:
        parameters: the trainable parameters, in the plan's order.
        buckets: indices of parameters, in the order in which backward completes them.
        wire_dtype: dtype of the buckets.
        sum_dtype: dtype of the sums over micro-batches. If parameters have another dtype (bf16), the sums are not in
            `.grad`.
        group: ranks to sum over; None: this rank only. With one rank nothing is copied or sent.
        compressed: sums the buckets in another format; None: plain all-reduces do.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        buckets: Sequence[Sequence[int]],
        wire_dtype: torch.dtype,
        sum_dtype: torch.dtype,
        group: ProcessGroup | None,
        compressed: CompressedBuckets | None = None,
    ) -> None:
        self.parameters, self.buckets = list(parameters), buckets
        self.compressed, self.step = compressed, 0
        self.bucket_of = {index: number for number, bucket in enumerate(self.buckets) for index in bucket}
        self.group = group
        self.alone = group is None or group.size() == 1
        self.wire_dtype, self.sum_dtype = wire_dtype, sum_dtype
        self.in_place = not self.alone and wire_dtype == sum_dtype
        self.own = self._own_sums()
        self.last = False
        self.sums: dict[int, torch.Tensor] = {}
        self.complete: dict[int, torch.Tensor] = {}
        self.views: dict[int, torch.Tensor] = {}
        self.buffers: list[torch.Tensor] = []
        self.works: list[Any] = []
        self.release()
        if not self.alone:
            self._allocate()
        self.hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook(index))  # type: ignore[no-untyped-call]
            for index, parameter in enumerate(self.parameters)
            if group is not None or parameter.dtype != sum_dtype  # else `reduce` takes the sum from `.grad`
        ]

    def _own_sums(self) -> OwnSums | None:
        """Sums of the gradients before those of other ranks are added; None: none are added, and the host sees them."""
        from codescent.strategies.own_sums import OwnSums  # noqa: PLC0415 - needs torch

        on_host = all(parameter.device.type == "cpu" for parameter in self.parameters)
        return None if self.alone and on_host else OwnSums()

    def _allocate(self) -> None:
        for bucket in self.buckets:
            sizes = [self.parameters[index].numel() for index in bucket]
            buffer = self.parameters[bucket[0]].detach().new_empty(sum(sizes), dtype=self.wire_dtype)
            self.buffers.append(buffer)
            for index, part in zip(bucket, buffer.split_with_sizes(sizes), strict=True):
                self.views[index] = part.view_as(self.parameters[index])

    def _hook(self, index: int) -> Any:
        def arrived(parameter: torch.Tensor) -> None:
            gradient = parameter.grad
            assert gradient is not None
            if gradient.dtype != self.sum_dtype:
                gradient = self._add(index, gradient)
                parameter.grad = None
            elif self.in_place and gradient is not self.views[index]:
                # From now on autograd adds the other micro-batches' gradients directly into the bucket.
                parameter.grad = gradient = self.views[index].copy_(gradient)
            if self.last:
                parameter.grad = None
                self._completed(index, gradient)

        return arrived

    def _add(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        """Add a gradient to the sum over micro-batches. A sum in the gradients' bf16 would lose small contributions."""
        if index in self.sums:
            return self.sums[index].add_(gradient)
        self.sums[index] = self.views[index].copy_(gradient) if self.in_place else gradient.to(self.sum_dtype)
        return self.sums[index]

    def _completed(self, index: int, gradient: torch.Tensor) -> None:
        if self.alone:
            self.complete[index] = gradient
            return
        view = self.views[index]
        self.complete[index] = view if gradient is view else view.copy_(gradient)
        self.missing[self.bucket_of[index]] -= 1
        while self.next_bucket < len(self.buckets) and self.missing[self.next_bucket] == 0:
            self.works.append(self._start(self.next_bucket))
            self.next_bucket += 1

    def _start(self, number: int) -> Any:
        """Begin to sum a full bucket over the ranks."""
        from codescent.strategies.collectives import start_all_reduce  # noqa: PLC0415 - keeps torch out of planning

        if self.own is not None:
            self.own.add(self.buckets[number], [self.views[index] for index in self.buckets[number]])
        if self.compressed is not None and self.step >= self.compressed.since:
            return self.compressed.start(number, [self.views[index] for index in self.buckets[number]])
        return start_all_reduce(self.buffers[number], group=self.group)

    def before_backward(self, *, last: bool, chunk: int = 0, step: int = 0) -> None:
        """See Gradients. `chunk` is not needed: only the hooks of this chunk's parameters run."""
        self.last, self.step = last, step
        if self.own is not None:
            self.own.begin(step)

    def reduce(self) -> None:
        """See Gradients. A parameter that did not contribute to the loss has a gradient of zero."""
        for index, parameter in enumerate(self.parameters):
            if index not in self.complete:
                seen = self.sums.get(index, parameter.grad)
                parameter.grad = None
                self._completed(index, parameter.detach().clone().zero_() if seen is None else seen)
        for work in self.works:
            work.wait()
        self.works.clear()
        if self.own is not None and self.alone and self.parameters:
            self.own.add(range(len(self.parameters)), self.collect())

    def not_finite(self, step: int) -> Sequence[int] | None:
        """See Gradients."""
        return None if self.own is None else self.own.not_finite(step)

    def collect(self) -> Sequence[torch.Tensor]:
        """See Gradients."""
        return [self.complete[index] for index in range(len(self.parameters))]

    def release(self) -> None:
        """See Gradients. The memory of the buckets is reused in the next step."""
        self.complete.clear()
        self.sums.clear()
        self.missing = [len(bucket) for bucket in self.buckets]
        self.next_bucket = 0

    def held(self) -> Held:
        """See Gradients. Buckets are gradients: their second copy, or the only one."""
        apart = [gradient for parameter in self.parameters if (gradient := parameter.grad) is not None]
        buffers = self.compressed.buffers() if self.compressed is not None else []
        return Held([*self.buffers, *self.sums.values(), *self.complete.values(), *apart], buffers)

    def state(self) -> Mapping[str, torch.Tensor]:
        """See Gradients."""
        return self.compressed.state() if self.compressed is not None else {}

    def close(self) -> None:
        """See Gradients. Drops the process group, because its threads would crash at the end of the process."""
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()
        self.works.clear()
        if self.compressed is not None:
            self.compressed.close()
        self.group = None
