"""In: a plan, seconds of arithmetic of a step. Out: seconds of each instruction of a rank.
Does not measure. coding.py has the seconds for what is exchanged."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from codescent.cost.lengths import lengths
from codescent.plan import Instruction, Plan

Seconds = Callable[[int, Instruction], float]
"""Seconds of arithmetic of a rank in an instruction."""


def arithmetic(plan: Plan, compute_s: float, slow: Mapping[int, float] | None = None) -> Seconds:
    """Seconds of each instruction, in the proportions of lengths.py.

    Args:
        plan: of a run.
        compute_s: seconds of arithmetic of a step, on a rank of the stage that computes most.
        slow: by rank: how many times longer it takes.
    """
    costs, stages, slow = lengths(plan).costs, len(plan.schedule.programs), slow or {}

    def units(stage: int, at: Instruction) -> float:
        found = getattr(costs, f"{at.verb}_s", 0.0)
        return float(found[at.chunk * stages + stage] if isinstance(found, tuple) else found)

    most = max(sum(units(stage, at) for at in program) for stage, program in enumerate(plan.schedule.programs))
    stage_of = [plan.role(rank) for rank in range(plan.world_size)]
    return lambda rank, at: units(stage_of[rank], at) * compute_s / most * slow.get(rank, 1.0)


def arithmetic_s(plan: Plan, flops_per_s: float) -> float:
    """Seconds of arithmetic of a step on a rank of the stage that computes most, by the FLOPs of the plan."""
    flops, model = plan.flops(), plan.model.forward_flops
    parts = [sum(sum(model[part.start : part.stop]) for part in plan.schedule.parts(s)) for s in range(plan.mesh.pp)]
    busiest = max(parts) / sum(parts) * plan.mesh.pp  # relative to the mean stage
    return busiest * (flops.total_flops + flops.recomputed_flops) / plan.mesh.world_size / flops_per_s
