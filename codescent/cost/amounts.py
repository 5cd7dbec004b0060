"""In: a plan. Out: its phases (opening steps, the steps before `wire_from`, the rest), and the bytes of their steps.
Does not print them (verbs/plan.py does) and knows no link (network.py does)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from codescent.plan import Plan, Traffic


@dataclass(frozen=True)
class Phase:
    """Consecutive steps in which the same collectives run, round after round.

    Attributes:
        first: its first step (from 0).
        until: the step before which it ends; None: it is the last phase.
        period: steps of a round of its collectives.
    """

    first: int
    until: int | None
    period: int

    @property
    def round_begins(self) -> int:
        """The first step of its first whole round."""
        return -(-self.first // self.period) * self.period


@dataclass(frozen=True)
class StepBytes:
    """Bytes of one rank in a step: the mean of a round, and in the round's worst step."""

    mean: float
    worst: float


def phases(plan: Plan) -> tuple[Phase, ...]:
    """The phases of a run; the last one is the steady state. Most plans have one."""
    firsts = {0, plan.schedule.opening_steps}
    firsts |= {step for record in plan.traffic for step in (record.since, record.until) if step is not None}
    found = []
    for first, until in zip(sorted(firsts), [*sorted(firsts)[1:], None]):
        every = (record.every for record in plan.traffic if _runs(record, first))
        period = 1 if first < plan.schedule.opening_steps else plan.schedule.period
        found.append(Phase(first, until, math.lcm(period, *every)))
    return tuple(found)


def busiest(plan: Plan, bytes_of: Callable[[Traffic], float], phase: Phase | None = None) -> StepBytes:
    """The bytes of the rank with the largest mean, and the most that a rank has in a step.

    `bytes_of`: bytes of a rank each time that a collective runs. `phase`: None: the last one.
    """
    phase = phase or phases(plan)[-1]
    records = list(runs_in(plan, phase))
    roles = range(len(plan.schedule.programs))
    stages = [[t for t in records if t.stage in (None, role)] for role in roles]
    means = [sum(t.times * bytes_of(t) / t.every for t in mine) for mine in stages]
    steps = [
        sum(t.times * bytes_of(t) for t in mine if number % t.every == t.at)
        for mine in stages
        for number in _different_steps(mine, phase.period)
    ]
    return StepBytes(max(means), max(steps))


def runs_in(plan: Plan, phase: Phase) -> Iterator[Traffic]:
    """The collectives of a phase."""
    yield from (record for record in plan.traffic if _runs(record, phase.first))


def one_step(plan: Plan, number: int) -> Plan:
    """The plan of step `number` (from 0) alone: its instructions and its collectives, as if every step had them.

    Lists of ranks outside of the mesh have none: only those of pipeline stages, or of the workers.
    """
    programs = tuple(
        tuple(replace(at, step=None) for at in plan.schedule.program(stage, number)) for stage in range(plan.mesh.pp)
    )
    schedule = replace(plan.schedule, programs=programs, period=1, opening=(), opening_steps=0)
    records = (record for record in plan.traffic if record.runs_in(number))
    traffic = tuple(replace(record, every=1, at=0, since=0, until=None) for record in records)
    return replace(plan, schedule=schedule, traffic=traffic)


def _runs(record: Traffic, first: int) -> bool:
    """Whether a collective is one of the phase that begins with step `first`."""
    return record.since <= first and (record.until is None or first < record.until)


def _different_steps(records: list[Traffic], period: int) -> list[int]:
    """Steps of a round; of those in which only the collectives of every step run, the first one."""
    own = {number for t in records if t.every > 1 for number in range(t.at, period, t.every)}
    return sorted(own | {number for number in range(period) if number not in own and number <= len(own)})
