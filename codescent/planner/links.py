"""In: the links of hosts, the speed of ranks, as texts or numbers. Out: `Links`: what the ranks of a plan do on them.
Does not simulate (cost/ranks_walk.py does) and does not measure a link."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from codescent.base.errors import UserError
from codescent.base.sizes import MemorySize
from codescent.clusters.link import Link
from codescent.cost.arithmetic import Seconds, arithmetic, arithmetic_s
from codescent.cost.coding import MEMORY_BYTES_PER_S, Coding
from codescent.cost.network import OVER_GLOO, OVER_NCCL, HostLinks
from codescent.cost.ranks_walk import walk
from codescent.cost.walked import Walk
from codescent.plan import Plan

SUCH_AS = "such as 49mbit,0.2ms; 3: 10mbit,5ms"
_HOST = re.compile(r"\d{1,9}\s*", re.ASCII)
_SLOW = re.compile(r"(\d{1,9})\s*:\s*(\d{1,9}(?:\.\d{1,9})?)\s*x", re.ASCII)

WALKED_STEPS = 16
"""Steps of a round that is given out in portions, where its period is searched: each rank may take other ones."""
Apart = Callable[[int | None], Plan]
"""The plan whose replicas train apart, with this period, or with that of the config (None)."""


@dataclass(frozen=True)
class Links:
    """Links of hosts, and speeds of ranks.

    Attributes:
        link: of each host.
        compute_s, flops_per_s: one of them is given.
        slow: by rank: how many times longer its arithmetic takes.
        memory_bytes_per_s: of a rank, which bounds how fast it codes; None: this processor's coding is measured.
        memory: of a rank's device; None: not given.
    """

    link: HostLinks
    compute_s: float | None
    flops_per_s: float | None
    slow: Mapping[int, float]
    ranks_per_host: int
    memory_bytes_per_s: float | None = MEMORY_BYTES_PER_S
    memory: MemorySize | None = None

    def of_device(self, device: str) -> Links:
        """The same, with the backend of a `train.device`: NCCL's collectives are rings. auto counts as a CPU."""
        return replace(self, link=replace(self.link, to_each=OVER_NCCL if device == "cuda" else OVER_GLOO))

    def step_s(self, plan: Plan) -> float:
        """Seconds of arithmetic of a step on a rank of the stage that computes most."""
        if self.compute_s is not None:
            return self.compute_s
        return arithmetic_s(plan, self.flops_per_s or math.nan)

    def seconds(self, plan: Plan) -> Seconds:
        """Seconds of each instruction."""
        return arithmetic(plan, self.step_s(plan), self.slow)

    def walk(self, plan: Plan, coding: Coding, *, timeline: bool, times: float = 1.0) -> Walk:
        """The steady rounds of a plan. `timeline`: what each rank did and when, too. `times`: as long is a step."""
        ranks, seconds = self.ranks_per_host, arithmetic(plan, times * self.step_s(plan), self.slow)
        return walk(plan, seconds, self.link, coding=coding, ranks_per_host=ranks, timeline=timeline)

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
        return math.ceil(plan.world_size / self.ranks_per_host)


def host_links_of(text: str) -> HostLinks:
    """Read a text such as "49mbit,0.2ms" or "49mbit,0.2ms; 3: 10mbit,5ms": the link of all hosts, and of single ones.

    A host's link without a latency has the common one. Raises UserError: every part that is wrong.
    """
    parts = [part for part in map(str.strip, text.split(";")) if part] or [text]
    common = [part for part in parts if ":" not in part]
    problems: list[str] = []
    if not common:
        problems.append(f"the link of the other hosts is missing: one without a host, {SUCH_AS}")
    if len(common) > 1:
        several = " and ".join(f"'{part}'" for part in common)
        problems.append(f"{several} are without a host: one link is that of all other hosts, {SUCH_AS}")
    links = [link for part in common if (link := link_of(part, 0.0, "", problems)) is not None]
    latency_s = links[0].latency_s if links else 0.0
    own: dict[int, Link] = {}
    named: set[int] = set()
    for host, _, size in (part.partition(":") for part in parts if ":" in part):
        if not _HOST.fullmatch(host):
            problems.append(f"'{host}:{size}' is not a host and its link, {SUCH_AS}")
            continue
        if int(host) in named:
            problems.append(f"host {int(host)} is named twice")
        named.add(int(host))
        if (link := link_of(size.strip(), latency_s, f"host {int(host)}: ", problems)) is not None:
            own[int(host)] = link
    if problems:
        raise UserError(*dict.fromkeys(problems))
    return HostLinks(links[0], own)


def link_of(text: str, latency_s: float, where: str, problems: list[str]) -> Link | None:
    """Read a link. What is no link is a problem; `where` names it."""
    try:
        return Link.parse(text, latency_s)
    except ValueError as error:
        problems.append(f"{where}{error}")
        return None


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
