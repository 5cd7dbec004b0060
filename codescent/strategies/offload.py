"""In: a plan's tensors, parallel.offload. Out: the same tensors, with optimizer state and master weights placed in host
memory; if parallel.offload is "all", also the weights.
Does not copy data: train/host_copy.py does, and torch's fully_shard does with ZeRO."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from codescent.base.refusal import Change, Refusal
from codescent.plan import DTYPE_BYTES, Collective, Memory, Plan, TensorPlan, Traffic, Verb
from codescent.strategies.strategy import Candidate, Strategy


class Offload(Strategy):
    """Host memory for master copies and optimizer state (Ren et al. 2021, "ZeRO-Offload", USENIX ATC), and with "all"
    also for the weights (Rajbhandari et al. 2021, "ZeRO-Infinity", SC21). The optimizer runs where its state is.

    train/machine refuses this strategy on a CPU, so it has no variants for `prove`.
    """

    def active(self, run: Candidate | Plan) -> bool:
        """True if parallel.offload is set."""
        return run.layout.offload != "none"

    def refuse(self, candidate: Candidate) -> Iterator[str]:
        """Refuse weights in host memory that zero does not gather block by block."""
        degree, stage = candidate.mesh.dp_shard, candidate.layout.zero_stage
        if candidate.layout.offload == "all" and (degree == 1 or stage < 3):
            less = "none" if candidate.layout.apart or candidate.layout.served else "optimizer"  # they refuse any
            sharded = [Change({"parallel.zero_stage": 3})] if degree > 1 else []
            yield Refusal(
                f'parallel.offload = "all" with dp_shard = {degree} and zero_stage = {stage}: weights in the host\'s '
                "memory must be gathered block by block, which needs zero_stage = 3 and dp_shard >= 2",
                [*sharded, Change({"parallel.offload": less})],
            )

    def place(self, tensor: TensorPlan, candidate: Candidate) -> TensorPlan:
        """Place master copies and optimizer state in host memory; with "all" also the weights.

        With zero, the weights are gathered from master shards in host memory. There the shards of gradients are in host
        memory, too; with stage 1 they are not, because gradients are whole until they are sent. Without zero, the host
        has a master copy of the device's weights.
        """
        host = Memory.HOST
        if candidate.layout.offload == "all":
            return replace(tensor, weights_in=host, gradients_in=host, optimizer_in=host)
        tensor = replace(tensor, optimizer_in=host, master_dtype=tensor.master_dtype or tensor.optimizer_dtype)
        if tensor.updated_on_host or tensor.gradients != tensor.optimizer:
            return tensor
        return replace(tensor, gradients_in=host)

    def traffic(self, plan: Plan, stage: int) -> Iterator[Traffic]:
        """Copies of gradients to the host and of weights back, once per step. Zero declares its own copies."""
        tensors = [tensor for tensor in plan.held_by(stage) if tensor.updated_on_host]
        if not tensors:
            return
        numel = sum(tensor.optimizer.numel(tensor.parameter.shape, plan.mesh) for tensor in tensors)
        down, up = tensors[0].bucket_dtype or tensors[0].gradient_dtype, tensors[0].weight_dtype
        for dtype, what in ((down, "gradients, to the host"), (up, "weights, to the device")):
            yield Traffic(Collective.COPY, "", numel * DTYPE_BYTES[dtype], dtype, Verb.STEP, None, what)
