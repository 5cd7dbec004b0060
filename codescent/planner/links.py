"""In: a cluster, the speed of its ranks. Out: `Links`: what the ranks of a plan do there, each on its own.
Does not simulate (cost/ranks_walk.py does) and does not measure a link."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from codescent.base.device_kinds import AUTO, kernels_of
from codescent.base.sizes import MemorySize
from codescent.clusters.cluster import Cluster, Software
from codescent.cost.arithmetic import Seconds, arithmetic, arithmetic_on, arithmetic_s, step_s_of
from codescent.cost.coding import MEMORY_BYTES_PER_S, Coding
from codescent.cost.ranks_walk import walk
from codescent.cost.walked import Walk
from codescent.plan import Plan
from codescent.plan.activations import CPU

_SLOW = re.compile(r"(\d{1,9})\s*:\s*(\d{1,9}(?:\.\d{1,9})?)\s*x", re.ASCII)

WALKED_STEPS = 16
"""Steps of a round that is given out in portions, where its period is searched: each rank may take other ones."""
Apart = Callable[[int | None], Plan]
"""The plan whose replicas train apart, with this period, or with that of the config (None)."""


@dataclass(frozen=True)
class Links:
    """The machines of a walk over all ranks, and speeds of ranks.

    Attributes:
        cluster: the machines, with links as they are reached. Of one by links alone (`clusters/by_links.py`) the
            devices are not known.
        software: whose constants tell how long its devices compute; None: compute_s or flops_per_s does.
        compute_s, flops_per_s: at most one of them.
        slow: by rank: how many times longer its arithmetic takes.
        memory_bytes_per_s: of a rank, which bounds how fast it codes; None: this processor's coding is measured.
        memory: of a rank's device; None: not given.
    """

    cluster: Cluster
    software: Software | None
    compute_s: float | None
    flops_per_s: float | None
    slow: Mapping[int, float]
    memory_bytes_per_s: float | None = MEMORY_BYTES_PER_S
    memory: MemorySize | None = None

    @property
    def is_by_devices(self) -> bool:
        """Whether the devices of the cluster say how long the arithmetic takes."""
        return self.compute_s is None and self.flops_per_s is None

    @property
    def collective_s(self) -> float:
        """Seconds of a collective beside its messages."""
        return self.software.collective_s if self.software else 0.0

    def step_s(self, plan: Plan) -> float:
        """Seconds of arithmetic of a step on a rank of the stage that computes most."""
        if self.compute_s is not None:
            return self.compute_s
        if self.flops_per_s is not None or self.software is None:
            return arithmetic_s(plan, self.flops_per_s or math.nan)
        return step_s_of(plan, arithmetic_on(plan, self.cluster, self.software))

    def seconds(self, plan: Plan, times: float = 1.0) -> Seconds:
        """Seconds of each instruction. `times`: as long is a step."""
        if self.is_by_devices and self.software is not None:
            each = arithmetic_on(plan, self.cluster, self.software, self.slow)
            return lambda rank, at: times * each(rank, at)
        return arithmetic(plan, times * self.step_s(plan), self.slow)

    def walk(self, plan: Plan, coding: Coding, *, timeline: bool, times: float = 1.0) -> Walk:
        """The steady rounds of a plan. `timeline`: what each rank did and when, too. `times`: as long is a step."""
        seconds = self.seconds(plan, times)
        return walk(plan, seconds, self.cluster, coding=coding, collective_s=self.collective_s, timeline=timeline)

    def with_period(self, plan: Plan, coding: Coding, apart: Apart) -> Callable[[int], Walk]:
        """What the ranks of a plan that gives out portions do with another period.

        A round of n steps is walked as one of WALKED_STEPS steps that are longer: long rounds take no longer.
        """
        if plan.layout.averages_beside:
            return lambda period: self.walk(apart(period), coding, timeline=False)
        few = apart(WALKED_STEPS)
        return lambda period: self.walk(few, coding, timeline=False, times=period / WALKED_STEPS)

    def hosts(self, plan: Plan) -> int:
        """How many hosts the plan has."""
        return math.ceil(plan.world_size / self.cluster.devices)


def on_device(links: Links, kind: str) -> Links:
    """The same, with the collectives of a `train.device`: NCCL's are rings. auto counts as a CPU."""
    device = replace(links.cluster.device, kind=CPU if kind == AUTO else kernels_of(kind))
    return replace(links, cluster=replace(links.cluster, device=device))


def slow_of(text: str) -> dict[int, float]:
    """Read a text such as "3: 4x" or "0: 2x, 3: 1.5x". Raises ValueError, which names the form."""
    found: dict[int, float] = {}
    for part in [part for part in map(str.strip, text.split(",")) if part] or [text]:
        match = _SLOW.fullmatch(part)
        if match is None or not float(match[2]) or int(match[1]) in found:
            raise ValueError(
                f"'{part}' is not a rank and how many times longer it takes, each rank once, such as 3: 4x"
            )
        found[int(match[1])] = float(match[2])
    return found
