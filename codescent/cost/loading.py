"""In: a plan, a stage, a cluster, a software. Out: the seconds in which a rank reads its samples, and copies them.
Does not say which of them a step waits for (price.py does) and does not read."""

from __future__ import annotations

from codescent.clusters.cluster import Cluster, Software
from codescent.plan import Instruction, Plan, Verb
from codescent.plan.activations import CUDA

TOKEN_BYTES, COMPONENT_BYTES = 8, 4
"""Of a token, and of a component of a vector, in a batch (data/samples.py): int64 and float32."""


def microbatch_bytes(plan: Plan) -> int:
    """Bytes of the inputs and targets of a micro-batch, as the loader gives them. Each position has an input, and those
    of the last stream have a target. Ranks of tp and cp read whole samples."""
    each = TOKEN_BYTES if plan.model.vocab_size else COMPONENT_BYTES * plan.model.hidden_dim
    return plan.work.microbatch_size * each * (plan.work.seq_len + plan.work.positions(-1))


class Loading:
    """What the ranks of a stage load in a step.

    Attributes:
        first: the instruction before which a rank has all samples of its step; None: the stage loads nothing.
        read_s: seconds in which a rank's loader makes the batches of a step out of files in the page cache. Half of the
            steps that are read ahead are one read (data/loader.py).
        copy_s: of one micro-batch to the device; on a CPU there is no copy.
        ahead: whether a thread reads while others compute.
    """

    def __init__(self, plan: Plan, stage: int, cluster: Cluster, software: Software) -> None:
        self.first = next((at for at in plan.computing.programs[stage] if at.verb is Verb.LOAD), None)
        self.ahead = plan.work.prefetch > 0
        size = 0 if self.first is None else microbatch_bytes(plan)
        bytes_s = plan.work.num_microbatches * size / software.load_bytes_per_s
        self.read_s = bytes_s + software.load_s / max(1, plan.work.prefetch // 2) if size else 0.0
        copies = size and cluster.device.kind == CUDA
        self.copy_s = cluster.bus.seconds(size) if copies else 0.0

    def begins_step(self, at: Instruction) -> bool:
        """Whether a rank waits for its samples before this LOAD."""
        first = self.first
        return first is not None and (at.verb, at.microbatch, at.chunk) == (first.verb, first.microbatch, first.chunk)

    def seconds(self, at: Instruction) -> float:
        """Of a LOAD: its copy, and where nothing is read ahead, all samples of the step before the first one."""
        return self.copy_s + (self.read_s if self.begins_step(at) and not self.ahead else 0.0)

    def late_s(self, step_s: float) -> float:
        """By how much reading ahead takes longer than a step: so long each step waits for its samples."""
        return max(0.0, self.read_s - step_s) if self.ahead else 0.0
