"""In: a plan, a cluster, a software. Out: `Price`: the seconds of a step, by what takes them, and the memory of stages.
Does not try other plans (planner/ does) and does not print (verbs/plan_price.py does)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from codescent.base.errors import UserError
from codescent.clusters.cluster import Cluster, Software
from codescent.cost.dataflow import StageMessage
from codescent.cost.lanes import Kind, StageLanes, kind_of, lanes_of
from codescent.cost.peak import PeakPlace, peak_place
from codescent.cost.shared_sends import SharedSends
from codescent.cost.simulate import Simulation, simulate
from codescent.cost.stage_memory import Fitting, StageMemory, stage_memory
from codescent.cost.stage_time import StageTime
from codescent.cost.time_parts import TimeParts
from codescent.cost.transfers import link_of, transfers
from codescent.plan import Instruction, Plan, Verb


@dataclass(frozen=True)
class Price:
    """What a step costs.

    Attributes:
        plan, cluster, software: what was priced.
        parts: the seconds of the busiest stage; `bubble_s` is what it waits for other stages.
        costs: of the instructions.
    """

    plan: Plan
    cluster: Cluster
    software: Software
    parts: TimeParts
    costs: StageCosts

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.parts.total_s

    def simulate(self) -> Simulation:
        """The same step with all instructions and messages, to be drawn."""
        waits = {
            (stage, at): self.costs.parts_of(kind_of(stage, at), at).exposed_s
            for stage, program in enumerate(self.plan.computing.programs)
            for at in program
            if at.peer is None
        }
        return simulate(self.plan.computing, _Computing(self.costs), waits=waits)

    @property
    def tokens_per_s(self) -> float:
        """Of all ranks."""
        return self.plan.work.tokens / self.step_s

    @property
    def devices(self) -> int:
        """Devices that compute: of all ranks."""
        return self.plan.mesh.world_size * self.plan.devices

    @property
    def peak_flops_per_s(self) -> float:
        """Of the matrix products of one device, in the number format of the run."""
        return self.cluster.device.peak(self.software.precision or self.plan.work.precision)

    def utilization(self, flops: float) -> float:
        """The share of the peak of all devices that so many FLOPs of a step are."""
        return flops / (self.step_s * self.peak_flops_per_s * self.devices)

    @cached_property
    def memory(self) -> tuple[StageMemory, ...]:
        """Of each stage."""
        return memory_of(self.plan, self.cluster, self.software)

    @property
    def fullest(self) -> int:
        """The stage that holds most."""
        return max(range(len(self.memory)), key=lambda stage: self.memory[stage].total)

    @cached_property
    def peak(self) -> PeakPlace | None:
        """Where in a step the fullest stage holds most. None: not all that it keeps is declared."""
        stage = self.fullest
        return peak_place(self.plan, stage, self.memory[stage], self.cluster.device.kind, self.software)

    @property
    def verdict(self) -> Fitting:
        """Whether all ranks fit in their devices."""
        return self.memory[self.fullest].verdict(self.cluster.device, calibrated=bool(self.software.fitted_on))


def memory_of(plan: Plan, cluster: Cluster, software: Software) -> tuple[StageMemory, ...]:
    """What the first rank of each stage holds."""
    return tuple(stage_memory(plan, stage, cluster, software) for stage in range(plan.mesh.pp))


class StageCosts:
    """Seconds of the instructions and messages of all stages (`simulate.Timed`).

    The first forward and the last backward pass of a chunk differ from the others: they gather weights, and send
    gradients.
    """

    def __init__(
        self, plan: Plan, cluster: Cluster, software: Software, slow: Mapping[int, float] | None = None
    ) -> None:
        self.slow, self.early = slow or {}, "gathers" in software.overlaps
        self.imbalance = software.imbalance if plan.mesh.world_size > 1 else 1.0
        self.stages = [StageTime(plan, stage, cluster, software) for stage in range(plan.mesh.pp)]
        self.sends = SharedSends(self.stages, transfers(plan.traffic, plan.mesh, cluster, software))
        self.messages_s = self.sends.messages_s
        self.latency_s = 0.0  # it is in `messages_s`
        self.late_s = 0.0
        self._found: dict[Kind, TimeParts] = {}

    def wait_for_data(self, step_s: float) -> bool:
        """Let each step wait for samples that are read for longer than `step_s`. Returns whether any are: then the
        step takes longer."""
        self.late_s = max(stage.loading.late_s(step_s) for stage in self.stages)
        if self.late_s:
            self._found = {kind: parts for kind, parts in self._found.items() if kind[1] is not Verb.LOAD}
        return self.late_s > 0.0

    def parts_of(self, kind: Kind, at: Instruction) -> TimeParts:
        """The seconds of instructions of a kind."""
        if kind not in self._found:
            parts = self._alone(kind, at)
            early = self.early and at.verb is Verb.FORWARD and kind[3]
            parts = self._begun_early(kind, at, parts) if early else parts
            self._found[kind] = parts + self.sends.delay(kind[0], at)
        return self._found[kind]

    def _alone(self, kind: Kind, at: Instruction) -> TimeParts:
        """The seconds of instructions of a kind, beside no message to another stage."""
        stage = self.stages[kind[0]]
        parts = stage.parts_of(at).waiting(self.imbalance).slower(self.slow.get(kind[0], 1.0))
        return parts + TimeParts(data_s=self.late_s) if self.late_s and stage.loading.begins_step(at) else parts

    def _begun_early(self, kind: Kind, at: Instruction, parts: TimeParts) -> TimeParts:
        """The first forward pass of a chunk. Its weights are gathered from the begin of the step on, and so beside the
        passes through all chunks before it."""
        steady = self._alone((*kind[:3], False), replace(at, microbatch=1))
        before = kind[2] * len(self.stages) + kind[0]
        left_s = max(0.0, parts.exposed_s - steady.exposed_s - before * steady.total_s)
        share = left_s / (parts.exposed_s - steady.exposed_s) if left_s else 0.0
        return steady + (parts + steady.times(-1.0)).times(share)

    def compute_s(self, stage: int, at: Instruction, virtual: int) -> float:
        """See `Timed`."""
        return self.parts_of(kind_of(stage, at), at).total_s

    def message_s(self, message: StageMessage) -> float:
        """See `Timed`."""
        stages = len(self.stages)
        return self.messages_s[link_of(message[1] % stages, stages, forward=message[0])]


class _Computing:
    """The seconds of instructions without what their ranks wait for."""

    def __init__(self, costs: StageCosts) -> None:
        self.costs, self.latency_s = costs, costs.latency_s

    def compute_s(self, stage: int, at: Instruction, virtual: int) -> float:
        """See `Timed`."""
        parts = self.costs.parts_of(kind_of(stage, at), at)
        return parts.total_s - parts.exposed_s

    def message_s(self, message: StageMessage) -> float:
        """See `Timed`."""
        return self.costs.message_s(message)


def _run(lanes: StageLanes, costs: StageCosts) -> tuple[float, list[float]]:
    """The makespan, and how long each stage computes."""
    return lanes.run(lambda kind, at: costs.parts_of(kind, at).total_s, costs.messages_s)


def price(
    plan: Plan,
    cluster: Cluster,
    software: Software,
    lanes: StageLanes | None = None,
    slow: Mapping[int, float] | None = None,
) -> Price:
    """The price of a step, in the steady state of a run. The mean of a round, where replicas train apart.

    Each stage is one lane: its ranks do the same. Ranks that are given portions of work have no such step.

    Args:
        plan, cluster, software: what is priced.
        lanes: of the plan, where one plan is priced several times.
        slow: by rank: how many times longer its device takes. The ranks of its stage wait for it.

    Raises:
        UserError: nothing declares what the model computes beside products.
    """
    if not plan.operators:
        raise UserError(
            f'model.kind = "{plan.model.kind}": what it computes beside products of matrices is not declared, so a '
            "step has no price; leave out the cluster"
        )
    factors: dict[int, float] = {}
    for rank, factor in (slow or {}).items():
        factors[plan.role(rank)] = max(factor, factors.get(plan.role(rank), 0.0))
    costs = StageCosts(plan, cluster, software, factors)
    lanes = lanes or lanes_of(plan.computing)
    makespan_s, busy_s = _run(lanes, costs)
    if costs.wait_for_data(makespan_s):
        makespan_s, busy_s = _run(lanes, costs)
    busiest = max(range(plan.mesh.pp), key=lambda stage: busy_s[stage])
    parts = TimeParts()
    for kind, times in Counter(kind_of(busiest, at) for at in plan.computing.programs[busiest]).items():
        if kind in lanes.kinds:
            parts += costs.parts_of(kind, lanes.kinds[kind]).times(times)
    bubble_s = max(0.0, makespan_s - parts.total_s) if plan.mesh.pp > 1 else 0.0
    return Price(plan, cluster, software, replace(parts, bubble_s=bubble_s), costs)
