"""In: the seconds that each rank works in a step, the plan. Out: the seconds that are expected of it; who is slow.
Does not measure: findings.py has the seconds from ranks.csv, profile.py from traces. Does not say who waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from codescent.cost.lengths import lengths
from codescent.plan import Plan

SLOW = 0.10
"""A rank is slow if it works so much longer than those that do the same."""
SLOW_PLANNED = 0.25
"""The same, if FLOPs of the plan say what is to be expected: passes do more than the FLOPs that are counted."""


@dataclass(frozen=True)
class Pace:
    """How long a rank works in a step.

    Attributes:
        seconds: of work.
        expected_s: the median of its peers; without peers that of all others for its share of the plan's FLOPs.
            0: unknown.
        peers: the other ranks of its pipeline stage, which do the same work.
        is_longest: no rank works longer.
    """

    seconds: float
    expected_s: float
    peers: tuple[int, ...]
    is_longest: bool

    @property
    def slower(self) -> float:
        """By which share it works longer than is expected."""
        return self.seconds / self.expected_s - 1 if self.expected_s else 0.0

    @property
    def is_slow(self) -> bool:
        """Whether it is slow. Of stages of one rank, only the longest can be: the others wait for it anyway."""
        return self.slower > SLOW if self.peers else self.slower > SLOW_PLANNED and self.is_longest


def paces(seconds: Sequence[float], plan: Plan) -> list[Pace]:
    """The pace of each rank. `seconds`: of all ranks of the plan, in their order."""
    stages = [plan.mesh.coordinates(rank)["pp"] for rank in range(len(seconds))]
    work = work_of_stages(plan)
    found = []
    for rank, (of_rank, stage) in enumerate(zip(seconds, stages, strict=True)):
        others = [other for other in range(len(seconds)) if other != rank]
        peers = tuple(other for other in others if stages[other] == stage)
        if peers:
            expected_s = median(seconds[other] for other in peers)
        else:
            known = [seconds[other] / work[stages[other]] for other in others if work[stages[other]]]
            expected_s = median(known) * work[stage] if known else 0.0
        found.append(Pace(of_rank, expected_s, peers, of_rank >= max(seconds)))
    return found


def work_of_stages(plan: Plan) -> list[float]:
    """The relative length of the passes of each stage, by the FLOPs of the plan."""
    costs = lengths(plan).costs
    passes = zip(_each(costs.forward_s), _each(costs.backward_s), strict=True)
    whole = [forward + backward for forward, backward in passes]
    return [sum(whole[stage :: plan.mesh.pp]) for stage in range(plan.mesh.pp)]


def _each(seconds: float | tuple[float, ...]) -> tuple[float, ...]:
    return seconds if isinstance(seconds, tuple) else (seconds,)
