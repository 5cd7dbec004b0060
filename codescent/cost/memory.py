"""In: a plan, a rank, a kind of device. Out: bytes that the rank holds at least at the fullest moment of a step, by
part; bytes that it sends or copies in a step.
Does not count what operators need while they compute, nor what an allocator holds besides. Does not measure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from codescent.cost.activations import is_known, most_bytes
from codescent.cost.amounts import busiest
from codescent.plan import AXES, DTYPE_BYTES, WIDE, Plan, Role
from codescent.plan.activations import ALIGNED_ROWS, CPU
from codescent.plan.state import StateBytes as StateBytes
from codescent.plan.state import state_bytes as state_bytes
from codescent.plan.state import state_of_rank as state_of_rank


@dataclass(frozen=True)
class RankMemory:
    """What a rank holds in the memory of its device, by part.

    Attributes:
        state: weights, gradients and optimizer state.
        activations_bytes: what forward passes keep for backward, at the fullest moment.
        head_bytes: logits and gradients of the head, while it computes the loss.
        whole: whether the activations are all that is kept. Else they are the inputs of blocks alone, because the
            compiler chooses what else is kept, or because it is not declared.
        adds: whether gradients are there during a forward pass: an earlier micro-batch has made them.
    """

    state: StateBytes
    activations_bytes: int
    head_bytes: int
    whole: bool
    adds: bool

    @property
    def least_bytes(self) -> int:
        """What a step needs at least. At the update all of the state is there. At the end of a forward pass there are
        weights, optimizer state, activations and the head; gradients only of earlier micro-batches."""
        before = 0 if self.adds else self.state.gradients_bytes
        forward = self.state.device_bytes - before + self.activations_bytes + self.head_bytes
        return max(self.state.device_bytes, forward)


def memory(plan: Plan, rank: int, device: str, chunk_tokens: int, *, compiled: bool) -> RankMemory:
    """What a rank holds.

    Args:
        plan, rank: of the run. A rank that is no server.
        device: its kind.
        chunk_tokens: tokens whose logits are in memory at a time; 0: all.
        compiled: whether blocks are compiled.
    """
    stage, whole = plan.mesh.coordinates(rank)["pp"], is_known(plan, device) and not compiled
    kept = most_bytes(plan, stage, device, rank) if whole else _inputs_bytes(plan, stage)
    head = head_bytes(plan, chunk_tokens, on_cpu=device == CPU) if stage == plan.mesh.pp - 1 else 0
    if whole and WIDE[plan.work.precision] == plan.work.precision:  # the sum of gradients is kept for backward, too
        head = min(head, head_bytes(plan, chunk_tokens, on_cpu=device == CPU, sums=False))
    return RankMemory(state_of_rank(plan, rank), kept, head, whole, adds=plan.work.num_microbatches > 1)


def _inputs_bytes(plan: Plan, stage: int) -> int:
    """The inputs of all blocks of a stage, of one micro-batch: the least that is kept for backward."""
    work, mesh, blocks = plan.work, plan.mesh, range(1, plan.model.num_layers + 1)
    depths = sum(depth in blocks for part in plan.schedule.parts(stage) for depth in part)
    tokens = work.microbatch_size * work.positions() / (mesh.cp * mesh.tp)
    return math.floor(tokens * plan.model.hidden_dim * DTYPE_BYTES[work.precision] * depths)


def inside_bytes(plan: Plan) -> float:
    """Bytes per step that a rank copies between its own devices, or between device and host: the largest rank."""
    return busiest(plan, lambda traffic: traffic.inside_bytes).mean


def wire_bytes(plan: Plan) -> float:
    """Bytes per step that a rank sends to other ranks, by the ring algorithms: the largest rank.

    The mean over a round, after the opening steps and those before `wire_from` (amounts.py has the other steps).
    """
    return busiest(plan, lambda traffic: traffic.wire_bytes(plan.mesh.degree(traffic.axis))).mean


def kept_kinds(plan: Plan) -> dict[str, int]:
    """Bytes of `Plan.kept` by kind (anchor, momentum, residual, ...), on the rank that keeps most."""
    kinds: list[dict[str, int]] = []
    for stage in range(plan.mesh.pp):
        found: dict[str, int] = {}
        rank = plan.mesh.rank_at({axis: stage * (axis == "pp") for axis in AXES})
        for kept in plan.kept:
            if kept.stage in (None, stage):
                _, kind, *rest = kept.name.split(".")  # outer.anchor.model.NAME, or wire.NUMBER.residual
                kind = rest[-1].replace("_", " ") if kind.isdecimal() else kind
                found[kind] = found.get(kind, 0) + kept.bytes(plan.mesh, rank)
        kinds.append(found)
    return max(kinds, key=lambda found: sum(found.values()))


def head_bytes(plan: Plan, chunk_tokens: int, *, on_cpu: bool, sums: bool = True) -> int:
    """Bytes that the head of a rank holds at least while it computes loss and gradients; 0: no head with a vocabulary.

    They are the logits of a chunk of tokens. With several chunks the wide sum of the weight's gradients is added, and
    on a CPU one chunk's part of that sum. Off the CPU, where V is not aligned, a copy of the matrix is added.
    `sums`: whether the wide sum counts.
    """
    mesh, work, model = plan.mesh, plan.work, plan.model
    depth = model.num_layers + 1
    heads = [t.parameter for t in plan.tensors if t.parameter.role is Role.VOCAB and depth in t.parameter.depths]
    if not any(len(parameter.shape) > 1 for parameter in heads):
        return 0
    # A share of whole numbers is a little more or less than they are, so it is rounded first.
    tokens = math.ceil(round(work.microbatch_size * work.positions(-1) * plan.task.head_share) / mesh.cp)
    rows, size, wide = math.ceil(model.vocab_size / mesh.tp), DTYPE_BYTES[work.precision], WIDE[work.precision]
    aligned = rows if on_cpu else math.ceil(rows / ALIGNED_ROWS) * ALIGNED_ROWS
    chunk = min(chunk_tokens or tokens, tokens)
    matrices = aligned * model.hidden_dim
    total = chunk * aligned * size
    if chunk < tokens:
        total += matrices * (DTYPE_BYTES[wide] * sums + (size if on_cpu else 0))
    return total + (matrices * size if aligned > rows else 0)
