"""In: a plan's tensors. Out: master copies and optimizer state, or all that zero has sharded, in the host's memory.
Does not move a byte itself: train/host_copy does, and torch's fully_shard does where the weights are gathered."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from codescent.plan import DTYPE_BYTES, Collective, Memory, Plan, TensorPlan, Traffic, Verb
from codescent.strategies.strategy import Candidate, Strategy


class Offload(Strategy):
    """Host memory for master copies and optimizer state (Ren et al. 2021, "ZeRO-Offload", USENIX ATC), and for the
    weights themselves (Rajbhandari et al. 2021, "ZeRO-Infinity", SC21). The optimizer runs where its state is.

    train/machine refuses it on a CPU, so there are no variants for `prove`.
    """

    def serves(self, run: Candidate | Plan) -> bool:
        """Where parallel.offload asks for it."""
        return run.layout.offload != "none"

    def refuse(self, candidate: Candidate) -> Iterator[str]:
        """Weights in host memory that are not gathered before they are read."""
        degree, stage = candidate.mesh.dp_shard, candidate.layout.zero_stage
        if candidate.layout.offload == "all" and (degree == 1 or stage < 3):
            yield (
                f'parallel.offload = "all" with dp_shard = {degree} and zero_stage = {stage}: weights '
                "that are in the host's memory are gathered block by block, which is what zero_stage = 3 with dp_shard "
                '>= 2 does; take these, or offload = "optimizer"'
            )

    def place(self, tensor: TensorPlan, candidate: Candidate) -> TensorPlan:
        """Master copies and optimizer state move to the host; with "all" the weights too.

        Where zero gathers the weights from the master shards (all stages), the gradients' shards move with them, unless
        they are whole until they are sent (stage 1). Else the host gets a master copy of the device's weights.
        """
        host = Memory.HOST
        if candidate.layout.offload == "all":
            return replace(tensor, weights_in=host, gradients_in=host, optimizer_in=host)
        tensor = replace(tensor, optimizer_in=host, master_dtype=tensor.master_dtype or tensor.optimizer_dtype)
        if tensor.updated_on_host or tensor.gradients != tensor.optimizer:
            return tensor
        return replace(tensor, gradients_in=host)

    def traffic(self, plan: Plan, stage: int) -> Iterator[Traffic]:
        """Gradients to the host and weights back, once in a step. What zero gathers and reduces, zero declares."""
        tensors = [tensor for tensor in plan.held_by(stage) if tensor.updated_on_host]
        if not tensors:
            return
        numel = sum(tensor.optimizer.numel(tensor.parameter.shape, plan.mesh) for tensor in tensors)
        down, up = tensors[0].bucket_dtype or tensors[0].gradient_dtype, tensors[0].weight_dtype
        for dtype, what in ((down, "gradients, to the host"), (up, "weights, to the device")):
            yield Traffic(Collective.COPY, "", numel * DTYPE_BYTES[dtype], dtype, Verb.STEP, None, what)
