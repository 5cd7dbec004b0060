"""In: a plan, seconds of arithmetic of a step, or the devices of a cluster. Out: seconds of each instruction of a rank.
Does not measure. coding.py has the seconds for what is exchanged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from codescent.clusters.cluster import Cluster, Software
from codescent.cost.lanes import kind_of
from codescent.cost.lengths import lengths
from codescent.cost.price import StageCosts
from codescent.plan import AXES, Instruction, Plan, Verb
from codescent.plan.state import state_of_rank

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


def arithmetic_on(plan: Plan, cluster: Cluster, software: Software, slow: Mapping[int, float] | None = None) -> Seconds:
    """Seconds of each instruction on the devices of a cluster, as a price has them, without messages and waiting.

    Where other ranks update, the last one among them, the last backward pass has the update: it belongs to the
    arithmetic, wherever it is made. `slow`: as in `arithmetic`.
    """
    costs = StageCosts(replace(plan, traffic=()), cluster, replace(software, imbalance=1.0))
    factors, last_s = slow or {}, 0.0
    if all(at.verb is not Verb.STEP for at in plan.schedule.programs[0]):
        held = state_of_rank(plan, plan.world_size - 1)
        moved = 2.0 * held.optimizer_bytes + held.gradients_bytes + held.weights_bytes
        last_s = moved / (cluster.device.memory_bytes_per_s * software.memory_efficiency)

    def seconds(rank: int, at: Instruction) -> float:
        if rank not in plan.mesh:
            return 0.0
        stage = plan.role(rank)
        update_s = last_s if at.verb is Verb.BACKWARD and at.last else 0.0
        return costs.parts_of(kind_of(stage, at), at).slower(factors.get(rank, 1.0)).total_s + update_s

    return seconds


def step_s_of(plan: Plan, seconds: Seconds) -> float:
    """Seconds of arithmetic of a step on the first rank of the stage that computes most. Of a round that of a step
    without exchanges."""
    programs = plan.computing.programs
    ranks = [plan.mesh.rank_at({axis: stage * (axis == "pp") for axis in AXES}) for stage in range(len(programs))]
    steady = ([at for at in program if at.step is None] for program in programs)
    return max(sum(seconds(rank, at) for at in program) for rank, program in zip(ranks, steady, strict=True))
