"""In: a plan's tensors. Out: master weights and optimizer state, or all that zero has divided, in the host's memory.
Does not move a byte itself: train/exchange does, and torch's fully_shard does where the weights are gathered."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from codescent.plan import DTYPE_BYTES, Collective, Memory, Plan, Schedule, TensorPlan, Traffic, Verb
from codescent.strategies.strategy import Ask, Gradients, Here

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class OffloadOptions:
    """`offload`: "none", "optimizer" (master weights and state) or "all" (weights too, which `zero_stage` 3 divides).
    `zero_stage`: whether weights are divided, too."""

    offload: str
    zero_stage: int


class Offload:
    """The host's memory for what only the update reads (Ren et al. 2021, "ZeRO-Offload", USENIX ATC), and for the
    weights themselves (Rajbhandari et al. 2021, "ZeRO-Infinity", SC21). The update is made where its state is.

    A run that computes on a CPU has one memory: it is refused when the device is known, in train/machine.
    """

    axis = ""
    Options = OffloadOptions
    # None for `prove` to try: its layouts run on any machine, and on a CPU this is refused. tests/test_offload.py does.
    variants: tuple[Mapping[str, Any], ...] = ()

    def __init__(self, options: OffloadOptions) -> None:
        self.what = options.offload
        self.stage = options.zero_stage

    def refuse(self, ask: Ask) -> Iterator[str]:
        """Weights away from the device that are not gathered before they are read."""
        if self.what == "all" and (ask.mesh.dp_shard == 1 or self.stage < 3):
            yield (
                f'parallel.offload = "all" with dp_shard = {ask.mesh.dp_shard} and zero_stage = {self.stage}: weights '
                "that are in the host's memory are gathered block by block, which is what zero_stage = 3 with dp_shard "
                '>= 2 does; take these, or offload = "optimizer"'
            )

    def place(self, tensor: TensorPlan, ask: Ask) -> TensorPlan:
        """Where zero gathers the weights from parts that the optimizer updates (stage 3, and the masters of stages 1
        and 2), these parts move, with their gradients; else there is a master copy of what the device reads."""
        if self.what == "none":
            return tensor
        if self.what == "all":
            host = Memory.HOST
            return replace(tensor, weights_in=host, gradients_in=host, optimizer_in=host)
        tensor = replace(tensor, optimizer_in=Memory.HOST, master_dtype=tensor.master_dtype or tensor.optimizer_dtype)
        if tensor.apart or tensor.gradients != tensor.optimizer:  # whole sums of micro-batches stay until they are sent
            return tensor
        return replace(tensor, gradients_in=Memory.HOST)

    def schedule(self, schedule: Schedule, ask: Ask) -> Schedule:
        """A step is the same list: what comes and goes belongs to STEP, or to zero's gathers and reductions."""
        return schedule

    def traffic(self, plan: Plan) -> Iterator[Traffic]:
        """Gradients to the host and weights back, once in a step. What zero gathers and reduces, zero declares."""
        for stage in range(plan.mesh.pp):
            tensors = [tensor for tensor in plan.held_by(stage) if tensor.apart]
            if not tensors:
                continue
            numel = sum(tensor.optimizer.numel(tensor.parameter.shape, plan.mesh) for tensor in tensors)
            down, up = tensors[0].bucket_dtype or tensors[0].gradient_dtype, tensors[0].weight_dtype
            at = stage if plan.mesh.pp > 1 else None
            for dtype, what in ((down, "gradients, to the host"), (up, "weights, to the device")):
                yield Traffic(Collective.COPY, "", numel * DTYPE_BYTES[dtype], dtype, Verb.STEP, None, what, stage=at)

    def divide(self, part: torch.nn.Module, here: Here) -> None:
        """The module stays as it is: the plan says where its tensors are made."""

    def gradients(self, parts: Sequence[torch.nn.Module], here: Here) -> Gradients | None:
        """Another strategy's."""
        return None
