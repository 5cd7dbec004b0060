"""In: a plan whose replicas train apart, seconds of arithmetic, links. Out: the least period that keeps the computing.
Does not say whether such a run learns as well (benchmarks do), and does not simulate (cost/ranks_walk.py does)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from codescent.clusters.cluster import Cluster
from codescent.cost.arithmetic import Seconds
from codescent.cost.coding import Coding
from codescent.cost.ranks_walk import NO_CODING, walk
from codescent.cost.walked import Walk
from codescent.plan import Instruction, Plan, Verb
from codescent.strategies import decides
from codescent.strategies.local_sgd import departures

KEEP = 0.8
"""The share of the time in which the slowest rank is to compute."""
MOST_PERIOD = 2**14
"""Longest period that is tried where portions of work are given out."""
NOTHING_DUE = {"train.eval_every": 0, "checkpoint.every": 0, "parallel.agree_every": None, "train.num_epochs": None}
"""Keys whose steps are multiples of the period, without effect."""


def least_period(
    plan: Plan,
    seconds: Seconds,
    cluster: Cluster,
    keep: float = KEEP,
    coding: Coding = NO_CODING,
    collective_s: float = 0.0,
    of_period: Callable[[int], Plan] | None = None,
) -> int:
    """The least `average_every`, or `gossip_every`, with which a step of the slowest replica alone is `keep` of the
    mean step. Replicas take their steps at the same time: `least_handed` is for others.

    n steps of A seconds and E exposed seconds of an exchange, with its coding, give n = E keep / ((1 - keep) A). Where
    steps overlap with the exchange, E is less in longer rounds. Rounds of doubled length are walked until E stays.

    Args:
        plan: of any period; its fragments and overlap are kept.
        seconds, cluster, coding, collective_s: as in `walk`.
        keep: above 0, below 1.
        of_period: the plan with another period; None: `with_period`.
    """
    layout = plan.layout
    least = layout.fragments + layout.overlap_steps if layout.average_every else 1
    inside = tuple(t for t in plan.traffic if t.verb not in (Verb.AVERAGE, Verb.MERGE, Verb.EXCHANGE))
    quiet = replace(plan, traffic=inside)
    alone = walk(quiet, seconds, cluster, collective_s=collective_s, warm_up=0, timeline=False)
    alone_s = max(rank.step_s for rank in alone.ranks)

    def step_s(period: int) -> float:
        other = with_period(plan, period) if of_period is None else of_period(period)
        found = walk(other, seconds, cluster, coding=coding, collective_s=collective_s, warm_up=0, timeline=False)
        return max(rank.step_s for rank in found.ranks)

    low, high, before_s = least - 1, least, math.inf
    while alone_s < keep * (mean_s := step_s(high)):
        exposed_s = (mean_s - alone_s) * high
        if not layout.overlap_steps or math.isclose(exposed_s, before_s, rel_tol=1e-6):
            return max(high, math.ceil(exposed_s * keep / ((1 - keep) * alone_s) - 1e-6))
        low, high, before_s = high, 2 * high, exposed_s
    return _bisected(low, high, lambda period: alone_s >= keep * step_s(period))


def least_handed(walk_of: Callable[[int], Walk], keep: float = KEEP) -> int | None:
    """The least period of a method that gives out portions of work, with which the ranks that train compute `keep` of
    the time, on average. Periods of doubled length are walked until one does; None: even MOST_PERIOD is too short.

    Args:
        walk_of: what the ranks do with this period.
        keep: above 0, below 1.
    """

    def keeps(period: int) -> bool:
        shares = [rank.busy_s / rank.step_s for rank in walk_of(period).ranks if rank.step_s]
        return sum(shares) >= keep * len(shares)

    high = 1
    while not keeps(high):
        high *= 2
        if high > MOST_PERIOD:
            return None
    return _bisected(high // 2, high, keeps)


def _bisected(low: int, high: int, keeps: Callable[[int], bool]) -> int:
    """The least period above `low` that keeps the computing; `high` does."""
    while high - low > 1:
        middle = (low + high) // 2
        if keeps(middle):
            high = middle
        else:
            low = middle
    return high


def with_period(plan: Plan, period: int) -> Plan:
    """The plan with rounds of another length, without what is different in the first steps.

    Raises ValueError: the period has no room for the fragments and their overlap.
    """
    layout, old = plan.layout, plan.layout.average_every
    if period < layout.fragments + layout.overlap_steps:
        raise ValueError(f"{period} steps have no room for {layout.fragments} fragments and their overlap")
    before = departures(old, layout.fragments, layout.overlap_steps)
    leaves = dict(zip(before, departures(period, layout.fragments, layout.overlap_steps), strict=True))

    def moved(at: Instruction) -> Instruction:
        if at.step is None:
            return at
        behind = layout.overlap_steps if at.verb is Verb.MERGE else 0
        return replace(at, step=leaves[at.step - behind] + behind)

    def order(at: Instruction) -> int:
        return -1 if at.step is None else 2 * at.step + (at.verb is Verb.MERGE)

    programs = tuple(tuple(sorted(map(moved, program), key=order)) for program in plan.schedule.programs)
    schedule = replace(plan.schedule, programs=programs, period=period, opening=(), opening_steps=0)
    traffic = []
    for record in (record for record in plan.traffic if record.until is None):
        again = replace(record, since=0)
        if record.verb is Verb.AVERAGE:
            again = replace(again, every=period, at=leaves[record.at])
        elif record.verb is Verb.MERGE:
            again = replace(again, every=period, at=period - 1)
        traffic.append(again)
    other = replace(layout, average_every=period, wire_from=0)
    found = replace(plan, schedule=schedule, traffic=tuple(traffic), layout=other)
    return replace(found, decides=decides(found))
