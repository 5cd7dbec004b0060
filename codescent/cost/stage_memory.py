"""In: a plan, a stage, a cluster, a software. Out: bytes that its first rank holds at the fullest moment, and whether
they fit.
Does not measure (train/memory.py counts) and does not say what would need less (planner/less_memory.py does)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields, replace
from enum import StrEnum

from codescent.base.dtypes import DTYPE_BYTES
from codescent.clusters.cluster import Cluster, ClusterDevice, Software
from codescent.cost.memory import memory
from codescent.cost.second_products import kept_tensors
from codescent.cost.stage_time import sends_layers
from codescent.plan import AXES, Collective, Plan, Verb
from codescent.plan.activations import chunk_bytes

FITS_CALIBRATED, FITS = 0.92, 0.80
"""Shares of a device that may be predicted full: with constants that were fitted on this machine, and without (Fujii et
al. 2024, "Accelerating LLM training with 4D parallelism and a memory consumption estimator": of 454 runs, none that was
estimated below 80 % ran out of memory)."""

ALWAYS = 1 << 40
"""A unit that a program always gathers again: more runs than there are micro-batches."""


class Fitting(StrEnum):
    """Whether a rank fits in its device."""

    FITS = "fits"
    TIGHT = "tight"
    TOO_LARGE = "does not fit"


@dataclass(frozen=True)
class StageMemory:
    """Bytes of the first rank of a stage.

    Attributes:
        weights, gradients, optimizer: as the plan keeps them.
        activations: what forward passes in flight keep for backward.
        logits: what the head holds while it computes the loss.
        gathered: weights that are gathered for a time, and gradients that are not scattered yet.
        device: what a device holds that computes nothing yet.
        fragments: what an allocator holds besides.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    gathered: float
    device: float
    fragments: float

    @property
    def total(self) -> float:
        """All of them."""
        return sum(float(getattr(self, field.name)) for field in fields(self))

    def verdict(self, device: ClusterDevice, *, calibrated: bool) -> Fitting:
        """Whether they fit. Tight: they may, because a prediction errs."""
        if self.total > device.memory_bytes:
            return Fitting.TOO_LARGE
        share = share_that_fits(calibrated=calibrated)
        return Fitting.FITS if self.total <= share * device.memory_bytes else Fitting.TIGHT


def share_that_fits(*, calibrated: bool) -> float:
    """The share of a device that may be predicted full. `calibrated`: with constants that were fitted here."""
    return FITS_CALIBRATED if calibrated else FITS


def stage_memory(plan: Plan, stage: int, cluster: Cluster, software: Software) -> StageMemory:
    """What the first rank of a stage holds, where nothing of a block is compiled."""
    rank = plan.mesh.rank_at({axis: stage * (axis == "pp") for axis in AXES})
    if software.second_products:
        plan = replace(plan, activations=tuple(kept_tensors(plan)))
    held = memory(plan, rank, cluster.device.kind, plan.model.head_chunk_tokens, compiled=False)
    state, kept = held.state, plan.held_by(stage)
    gradients = float(state.gradients_bytes)
    if software.gradient_bytes and kept:
        gradients *= software.gradient_bytes / DTYPE_BYTES[kept[0].gradient_dtype]
        if plan.layout.zero_stage == 1 and "dp_shard" in kept[0].gradients.shards:
            gradients *= plan.mesh.dp_shard  # such a program divides the optimizer alone
    logits = float(held.head_bytes)
    if software.logit_bytes and logits:
        logits = _logits(plan) * (software.logit_bytes + _joined_bytes(plan, software))
    over = plan.mesh.cp if software.shards_over_cp else 1
    parts = (state.weights_bytes / over, gradients / over, (state.optimizer_bytes - state.host_bytes) / over)
    kept_bytes = held.activations_bytes + block_bytes(plan, stage, rank, cluster.device.kind)
    found = (*parts, float(kept_bytes), logits, _gathered(plan, stage, software))
    return StageMemory(*found, software.held_bytes, software.fragments * sum(found))


def block_bytes(plan: Plan, stage: int, rank: int, device: str) -> int:
    """What a block keeps that backward computes again from its input, until its gradients are there: the most of a
    block of the stage (Korthikanti et al. 2022, section 5). 0: nothing is computed again."""
    last = plan.model.num_layers + 1
    blocks = [depth for part in plan.schedule.parts(stage) for depth in part if 0 < depth < last]
    ends = {*blocks[:1], *blocks[-1:]}
    each = (chunk_bytes(plan.again, range(one, one + 1), last, plan.mesh, device, rank) for one in ends)
    return max(each, default=0)


def _logits(plan: Plan) -> float:
    """Logits of a micro-batch on a rank."""
    work, mesh = plan.work, plan.mesh
    tokens = work.microbatch_size * work.positions(-1) * plan.task.head_share / mesh.cp
    return tokens * plan.model.vocab_size / mesh.tp


def _joined_bytes(plan: Plan, software: Software) -> int:
    """Bytes of a micro-batch's logit, of those that are kept until the step ends: each, and all joined. One of them
    counts as it is computed."""
    if not software.joins_outputs or plan.mesh.pp == 1:
        return 0
    return DTYPE_BYTES[plan.work.precision] * (2 * plan.work.num_microbatches - 1)


def _gathered(plan: Plan, stage: int, software: Software) -> float:
    """Units that are whole at the same time, and the gradients of the largest one before they are scattered.

    A unit that is gathered more than once for a micro-batch is let go of in between. Two of these count, the largest
    ones: one computes, and the next one comes. The others stay whole from forward to backward.
    """
    units, runs, gradients = dict[str, int](), Counter[str](), dict[str, int]()
    divided = {axis for tensor in plan.held_by(stage) for axis in tensor.weights.shards}
    for record in plan.traffic:
        over = divided.intersection(record.axis.split("*"))
        if record.stage not in (None, stage) or sends_layers(record) or not over:
            continue
        if record.collective is Collective.ALL_GATHER and record.verb in (Verb.FORWARD, Verb.BACKWARD):
            units[record.what] = record.payload_bytes
            is_root = record.during is None
            runs[record.what] += record.times if software.units != "again" or is_root else ALWAYS
        elif record.collective is Collective.REDUCE_SCATTER and record.verb is Verb.BACKWARD:
            gradients[record.what] = record.payload_bytes
    if software.units == "kept":
        return float(sum(units.values()) + sum(gradients.values()))
    freed = [size for what, size in units.items() if runs[what] > plan.work.num_microbatches]
    whole = sum(units.values()) - sum(freed)
    return float(whole + sum(sorted(freed)[-2:]) + max(gradients.values(), default=0))
