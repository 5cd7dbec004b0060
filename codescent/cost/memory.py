"""In: a plan. Out: bytes of its head, of what strategies keep, of inputs of blocks; bytes that a rank sends or copies.
Does not say what a rank holds (stage_memory.py does). Does not measure."""

from __future__ import annotations

import math

from codescent.cost.amounts import busiest
from codescent.plan import AXES, DTYPE_BYTES, WIDE, Plan, Role
from codescent.plan.activations import ALIGNED_ROWS
from codescent.plan.state import StateBytes as StateBytes
from codescent.plan.state import state_bytes as state_bytes
from codescent.plan.state import state_of_rank as state_of_rank


def inputs_bytes(plan: Plan, stage: int) -> int:
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

    They are the logits of a chunk of tokens, with a cap also their slopes. With several chunks the wide sum of the
    weight's gradients is added, and on a CPU one chunk's part of that sum. Off the CPU, where V is not aligned, a copy
    of the matrix is added. `sums`: whether the wide sum counts.
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
    total = chunk * (aligned + (rows if model.logit_cap else 0)) * size
    if chunk < tokens:
        total += matrices * (DTYPE_BYTES[wide] * sums + (size if on_cpu else 0))
    return total + (matrices * size if aligned > rows else 0)
