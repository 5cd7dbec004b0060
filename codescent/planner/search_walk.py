"""In: what the depths of a pass compute, what they send of weights and gradients. Out: the least seconds of the pass.
Does not know which depths a pass has (search_passes.py does). cost/stage_time.py walks through each depth instead."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from codescent.clusters.cluster import Software
from codescent.planner.search_computing import PassTime
from codescent.planner.search_sent import NONE, Seconds


@dataclass(frozen=True)
class Walk:
    """A pass of one micro-batch through consecutive depths.

    Messages that fit into the computation of a depth make it longer by `Software.contention` and are waited for no
    more. Of others it is only known that their link is busy.

    Attributes:
        computed: of all depths.
        begins, ends: of the depths that compute first and last.
        opens: what is gathered before the first depth.
        follows: what is gathered before the second one, if the first one hides little of it; else NONE.
        before: all that is gathered.
        after: all gradients.
        closes: what leaves the depth that computes last.
        aside: what leaves a depth beside which little or nothing is computed: next to the embedding.
        least_more_s, most_more_s: for how long depths wait besides.
        fits: whether the messages of each depth take no longer than it computes.
    """

    computed: PassTime
    begins: PassTime
    ends: PassTime
    software: Software
    opens: Seconds = NONE
    follows: Seconds = NONE
    before: Seconds = NONE
    after: Seconds = NONE
    closes: Seconds = NONE
    aside: Seconds = NONE
    least_more_s: float = 0.0
    most_more_s: float = 0.0
    fits: bool = False

    @property
    def hides(self) -> bool:
        """Whether messages travel beside the computation."""
        return "gathers" in self.software.overlaps

    @cached_property
    def opening_s(self) -> float:
        """Waiting for weights before the first two depths compute."""
        return max(self.opens) + max(0.0, max(self.follows) - self._most_s(self.begins))

    def _most_s(self, one: PassTime) -> float:
        """The most that depths take beside waiting for weights."""
        return self.software.contention * one.device_s + one.host_s + one.within_s + one.beside_s

    @cached_property
    def least_s(self) -> float:
        """Until the last depth has computed."""
        found = self.computed
        if not self.hides:
            return found.total_s + self.least_more_s + sum(self.before) + sum(self.after)
        gathered = zip(self.before, self.opens, self.follows, strict=True)
        left = zip(self.after, self.closes, self.aside, strict=True)
        beside_s = max(0.0, *(b - o - f + a - c - d for (b, o, f), (a, c, d) in zip(gathered, left, strict=True)))
        waits_s = found.within_s + self.least_more_s
        if self.fits:
            taken_s = (self.software.contention - 1.0) * beside_s
        else:
            beside_s = min(beside_s, found.device_s) - waits_s - found.beside_s - self.most_more_s
            taken_s = (1.0 - 1.0 / self.software.contention) * max(0.0, beside_s)
        computed_s = max(found.total_s + self.least_more_s, found.device_s + waits_s + taken_s)
        return max(self.opening_s + computed_s, max(self.before) + self.ends.total_s)

    @cached_property
    def most_s(self) -> float:
        """Until the last depth has computed, at most."""
        if not self.hides:
            return self.least_s
        return self._most_s(self.computed) + self.most_more_s + self.opened_most_s

    @cached_property
    def opened_most_s(self) -> float:
        """Waiting for weights, at most."""
        return max(self.opens) + max(self.follows) if self.fits else sum(self.before)

    @cached_property
    def left_s(self) -> float:
        """From then on, until the gradients have arrived."""
        if not self.hides:
            return 0.0
        most_s = self._most_s(self.computed) + self.most_more_s + sum(self.before)
        rest_s = most_s - self.begins.total_s  # the first one sends then
        last_s = self._most_s(self.ends) + self.most_more_s
        by_link = zip(self.after, self.closes, self.aside, strict=True)
        return sum(max(closes_s + max(0.0, aside_s - last_s), all_s - rest_s) for all_s, closes_s, aside_s in by_link)

    @property
    def all_s(self) -> float:
        """Until all gradients have arrived."""
        busy_s = max(before + after for before, after in zip(self.before, self.after, strict=True))
        return max(self.least_s + self.left_s, busy_s if self.hides else 0.0)
