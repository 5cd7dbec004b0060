"""In: a plan, a rank, a cluster, a software. Out: bytes that the rank holds at the fullest moment, by part, and whether
they fit. plan, train, launch, the price and the advice on memory all ask here.
Does not measure (train/memory.py counts) and does not say what would need less (planner/less_memory.py does)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType

from codescent.base.dtypes import DTYPE_BYTES
from codescent.clusters.by_links import UNKNOWN
from codescent.clusters.cluster import Cluster, ClusterDevice, Software
from codescent.cost.activations import computed_on, is_known, most_bytes
from codescent.cost.memory import head_bytes, inputs_bytes
from codescent.cost.second_products import kept_tensors
from codescent.cost.stage_time import sends_layers
from codescent.plan import AXES, WIDE, Collective, Plan, Verb
from codescent.plan.activations import CPU, SavedTensor, chunk_bytes
from codescent.plan.state import state_of_rank

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


PARTS: Mapping[str, str] = MappingProxyType({
    "weights": "weights", "gradients": "gradients", "optimizer": "optimizer", "activations": "activations",
    "logits": "logits", "gathered": "gathered", "device": "device and libraries", "fragments": "fragments",
})  # fmt: skip
"""The parts of what a rank holds, and what each is called on all screens."""


@dataclass(frozen=True)
class StageMemory:
    """Bytes of a rank on its device, and on its host.

    Attributes:
        weights, gradients, optimizer: as the plan keeps them.
        activations: what forward passes in flight keep for backward, and a block that backward computes again.
        logits: what the head holds while it computes the loss.
        gathered: weights that are gathered for a time, and gradients that are not scattered yet.
        device: what a device holds that computes nothing yet.
        fragments: what an allocator holds besides.
        host: state that is in the memory of the host. It is no part of the total.
        again: the block of `activations` that backward computes again.
        scattered: the gradients of `gathered`, which backward passes have.
        whole: whether the activations are all that is kept. Else they are the inputs of blocks alone, because it is
            not declared what else is kept.
        adds: whether gradients are there during a forward pass: an earlier micro-batch has made them.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    gathered: float
    device: float
    fragments: float
    host: float = 0.0
    again: float = 0.0
    scattered: float = 0.0
    whole: bool = True
    adds: bool = False

    @property
    def total(self) -> float:
        """All of them."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """The bytes of each of PARTS."""
        return {name: float(getattr(self, name)) for name in PARTS}

    @property
    def state(self) -> float:
        """Weights, gradients and optimizer on the device."""
        return self.weights + self.gradients + self.optimizer

    @property
    def least(self) -> float:
        """What a step needs at least. At the update all of the state is there. At the end of a forward pass there are
        weights, optimizer state, activations and the head; gradients only of earlier micro-batches."""
        before = 0.0 if self.adds else self.gradients
        return max(self.state, self.state - before + self.activations - self.again + self.logits)

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
    """What the first rank of a stage holds: see `memory`."""
    return memory(plan, plan.mesh.rank_at({axis: stage * (axis == "pp") for axis in AXES}), cluster, software)


def memory(
    plan: Plan,
    rank: int,
    cluster: Cluster,
    software: Software = UNKNOWN,
    *,
    chunk_tokens: int | None = None,
    compiled: str = "none",
) -> StageMemory:
    """What a rank holds.

    Args:
        plan, rank: of the run. A rank that only serves weights has state alone.
        cluster: the machines. Of one by a device alone (`clusters/by_links.py`) the kind counts.
        software: what its program holds besides; UNKNOWN: nothing.
        chunk_tokens: tokens whose logits are in memory at a time, 0: all; None: as the plan says.
        compiled: what torch.compile compiles ("none", "blocks" or "model"), if the software does not say it. Of a whole
            model, and on a CPU, only the inputs of blocks are sure to be kept.
    """
    state = state_of_rank(plan, rank)
    if rank not in plan.mesh:
        nothing = (0.0, 0.0, 0.0, software.held_bytes, software.fragments * state.device_bytes)
        return StageMemory(state.weights_bytes, state.gradients_bytes, state.optimizer_bytes, *nothing)
    stage, device = plan.mesh.coordinates(rank)["pp"], where(plan, cluster.device.kind, software, compiled)
    if software.second_products:
        plan = replace(plan, activations=tuple(kept_tensors(plan)))
    whole, kept = is_known(plan, device), plan.held_by(stage)
    weights, gradients, optimizer = map(float, state.on_device)
    if software.gradient_bytes and kept:
        gradients *= software.gradient_bytes / DTYPE_BYTES[kept[0].gradient_dtype]
        if plan.layout.zero_stage == 1 and "dp_shard" in kept[0].gradients.shards:
            gradients *= plan.mesh.dp_shard  # such a program divides the optimizer alone
    logits = float(_head_bytes(plan, stage, cluster.device.kind, chunk_tokens, whole=whole))
    if software.logit_bytes and logits:
        logits = _logits(plan) * (software.logit_bytes + _joined_bytes(plan, software))
    over = plan.mesh.cp if software.shards_over_cp else 1
    parts = (weights / over, gradients / over, optimizer / over)
    again = block_bytes(plan, stage, rank, device) if whole else 0
    kept_bytes = (most_bytes(plan, stage, device, rank) if whole else inputs_bytes(plan, stage)) + again
    units, scattered = _gathered(plan, stage, software)
    found = (*parts, float(kept_bytes), logits, units + scattered)
    beside = software.held_bytes, software.fragments * sum(found)
    adds = plan.work.num_microbatches > 1
    return StageMemory(*found, *beside, state.host_bytes, again, scattered, whole=whole, adds=adds)


def where(plan: Plan, device: str, software: Software, compiled: str = "none") -> str:
    """Where the blocks of a program compute on a kind of device: see `computed_on`."""
    return computed_on(plan, device, "blocks" if software.compiles else compiled)


def _head_bytes(plan: Plan, stage: int, device: str, chunk_tokens: int | None, *, whole: bool) -> int:
    """The head of the last stage. In the widest format its sum of gradients is also what is kept for backward."""
    if stage < plan.mesh.pp - 1:
        return 0
    chunk, on_cpu = plan.model.head_chunk_tokens if chunk_tokens is None else chunk_tokens, device == CPU
    head = head_bytes(plan, chunk, on_cpu=on_cpu)
    if whole and WIDE[plan.work.precision] == plan.work.precision:
        head = min(head, head_bytes(plan, chunk, on_cpu=on_cpu, sums=False))
    return head


def block_bytes(plan: Plan, stage: int, rank: int, device: str) -> int:
    """What a block keeps that backward computes again from its input, until its gradients are there: the most of a
    block of the stage (Korthikanti et al. 2022, section 5). 0: nothing is computed again."""
    return _most_of_a_block(plan, plan.again, stage, rank, device)


def largest_block(plan: Plan, stage: int, device: str) -> int:
    """What the largest block of a stage keeps of one micro-batch while its gradients are computed."""
    rank = plan.mesh.rank_at({axis: stage * (axis == "pp") for axis in AXES})
    return _most_of_a_block(plan, plan.again or plan.activations, stage, rank, device)


def _most_of_a_block(plan: Plan, tensors: Sequence[SavedTensor], stage: int, rank: int, device: str) -> int:
    last = plan.model.num_layers + 1
    blocks = [depth for part in plan.schedule.parts(stage) for depth in part if 0 < depth < last]
    ends = {*blocks[:1], *blocks[-1:]}  # of an encoder and of a decoder
    return max((chunk_bytes(tensors, range(one, one + 1), last, plan.mesh, device, rank) for one in ends), default=0)


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


def _gathered(plan: Plan, stage: int, software: Software) -> tuple[float, float]:
    """Units that are whole at the same time; the gradients of the largest one before they are scattered.

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
        return float(sum(units.values())), float(sum(gradients.values()))
    freed = [size for what, size in units.items() if runs[what] > plan.work.num_microbatches]
    whole = sum(units.values()) - sum(freed)
    return float(whole + sum(sorted(freed)[-2:])), float(max(gradients.values(), default=0))
