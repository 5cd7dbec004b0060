"""In: a plan, a cluster, a software. Out: `Price`: the seconds of a step, by what takes them, and the memory of stages.
Does not try other plans (planner/ does) and does not print (verbs/plan_price.py does)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property

from codescent.clusters.cluster import Cluster, Software
from codescent.cost.collective_time import seconds
from codescent.cost.simulate import Simulation, simulate
from codescent.cost.stage_memory import Fitting, StageMemory, stage_memory
from codescent.cost.stage_time import StageTime
from codescent.cost.time_parts import TimeParts
from codescent.plan import SENDS, Instruction, Plan, Verb


@dataclass(frozen=True)
class Price:
    """What a step costs.

    Attributes:
        plan, cluster, software: what was priced.
        parts: the seconds of the busiest stage; `bubble_s` is what it waits for other stages.
        simulation: of the stages.
    """

    plan: Plan
    cluster: Cluster
    software: Software
    parts: TimeParts
    simulation: Simulation

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.simulation.makespan_s

    @property
    def tokens_per_s(self) -> float:
        """Of all ranks."""
        return self.plan.work.tokens / self.step_s

    @property
    def peak_flops_per_s(self) -> float:
        """Of the matrix products of one device, in the number format of the run."""
        return self.cluster.device.peak(self.software.precision or self.plan.work.precision)

    def utilization(self, flops: float) -> float:
        """The share of the peak of all devices that so many FLOPs of a step are."""
        return flops / (self.step_s * self.peak_flops_per_s * self.plan.mesh.world_size)

    @cached_property
    def memory(self) -> tuple[StageMemory, ...]:
        """Of each stage."""
        stages = range(self.plan.mesh.pp)
        return tuple(stage_memory(self.plan, stage, self.cluster, self.software) for stage in stages)

    @property
    def fullest(self) -> int:
        """The stage that holds most."""
        return max(range(len(self.memory)), key=lambda stage: self.memory[stage].total)

    @property
    def verdict(self) -> Fitting:
        """Whether all ranks fit in their devices."""
        return self.memory[self.fullest].verdict(self.cluster.device, calibrated=bool(self.software.fitted_on))


class StageCosts:
    """Seconds of the instructions and messages of all stages (`simulate.Timed`).

    The first forward and the last backward pass of a chunk differ from the others: they gather weights, and send
    gradients.
    """

    def __init__(self, plan: Plan, cluster: Cluster, software: Software) -> None:
        self.stages = [StageTime(plan, stage, cluster, software) for stage in range(plan.mesh.pp)]
        sends = [record for record in plan.traffic if record.verb in SENDS]
        self.transfer_s = max((seconds(one, plan.mesh, 0, cluster, software)[1] for one in sends), default=0.0)
        self.latency_s = 0.0  # it is in `transfer_s`
        self._found: dict[tuple[int, Verb, int, bool], float] = {}

    def compute_s(self, stage: int, at: Instruction, virtual: int) -> float:
        """See `Timed`."""
        key = stage, *kind_of(at)
        if key not in self._found:
            self._found[key] = self.stages[stage].parts_of(at).total_s
        return self._found[key]

    def message_s(self, computed_by: int) -> float:
        """See `Timed`."""
        return self.transfer_s


def kind_of(at: Instruction) -> tuple[Verb, int, bool]:
    """Instructions of a stage with the same kind take the same time."""
    return at.verb, at.chunk, at.last or at.microbatch == 0


def price(plan: Plan, cluster: Cluster, software: Software) -> Price:
    """The price of a step, in the steady state of a run. The mean of a round, where replicas train apart.

    Each stage is one lane: its ranks do the same. Ranks that are given portions of work have no such step.
    """
    costs = StageCosts(plan, cluster, software)
    found = simulate(plan.computing, costs)
    busiest = max(range(plan.mesh.pp), key=lambda stage: found.stages[stage].busy_s)
    program = plan.computing.programs[busiest]
    kinds = {kind_of(at): at for at in program}
    parts = TimeParts()
    for kind, times in Counter(map(kind_of, program)).items():
        parts += costs.stages[busiest].parts_of(kinds[kind]).times(times)
    parts = replace(parts, bubble_s=max(0.0, found.makespan_s - parts.total_s))
    return Price(plan, cluster, software, parts, found)
