"""In: the seconds of the parts of steps, on the pages of ranks. Out: a rank that is slower than others, and the part.
Makes no collective. Of the ranks of one host: slow_links.py compares links."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from codescent.base.page import Page, Took

LEAST_STEPS, LEAST_S = 6, 2.0
"""A window has at least so many steps of every rank, and so many seconds."""
IN_A_ROW = 2
"""Windows in a row in which a rank must be slower: a pause of the machine is over by then."""
SLOWER = 1.5
"""A straggler computes and reads for this many times as long as the median of the others of its stage."""


@dataclass(frozen=True)
class SlowRank:
    """A rank that is slower than the others.

    Attributes:
        rank: which one.
        factor: how many times as long it works for a step as the median of the others.
        part: where most of the difference is: "arithmetic" or "reading".
        own_s: seconds of this part in a step, on this rank.
        others_s: the same, median of the others.
    """

    rank: int
    factor: float
    part: str
    own_s: float
    others_s: float

    def __str__(self) -> str:
        return f"rank {self.rank} {self.factor:.1f}x slower ({self.part})"


class Stragglers:
    """Compares the ranks of a host, window by window.

    Attributes:
        current: the slowest straggler of the last window, if it was one before; None: there is none.
    """

    def __init__(self) -> None:
        self.current: SlowRank | None = None
        self._base: dict[int, Took] = {}
        self._base_s = 0.0
        self._seen = (0, "", 0)  # rank and part of the slowest, and in how many windows in a row

    def look(self, pages: Mapping[int, Page], now_s: float) -> SlowRank | None:
        """Take in what the pages say. Returns a straggler that was not one before."""
        took = {rank: page.took for rank, page in pages.items() if page.took.steps and not page.died_s}
        if took.keys() != self._base.keys():  # the first step, which compiles, is behind every rank
            self._begin(took, now_s)
            return None
        each = {rank: one.since(self._base[rank]) for rank, one in took.items()}
        if now_s - self._base_s < LEAST_S or min((one.steps for one in each.values()), default=0) < LEAST_STEPS:
            return None
        self._begin(took, now_s)
        found = _slowest(each, {rank: pages[rank].stage for rank in each})
        rank, part, often = self._seen
        if found is None:
            self._seen, self.current = (0, "", 0), None
            return None
        often = often + 1 if (found.rank, found.part) == (rank, part) else 1
        self._seen = found.rank, found.part, often
        self.current = found if often >= IN_A_ROW else None
        return found if often == IN_A_ROW else None

    def _begin(self, took: dict[int, Took], now_s: float) -> None:
        self._base, self._base_s = took, now_s


def _slowest(each: Mapping[int, Took], stages: Mapping[int, int]) -> SlowRank | None:
    """The rank that works longest for a step, relative to the others of its stage, if it is a straggler."""
    found: list[SlowRank] = []
    for rank, own in each.items():
        others = [one for other, one in each.items() if other != rank and stages[other] == stages[rank]]
        if not others:
            continue
        usual_s = median(one.work_s / one.steps for one in others)
        factor = own.work_s / own.steps / usual_s if usual_s > 0 else 0.0
        if factor >= SLOWER:
            parts = {
                "arithmetic": (own.computing_s / own.steps, median(one.computing_s / one.steps for one in others)),
                "reading": (own.reading_s / own.steps, median(one.reading_s / one.steps for one in others)),
            }
            part = max(parts, key=lambda name: parts[name][0] - parts[name][1])
            found.append(SlowRank(rank, factor, part, *parts[part]))
    return max(found, key=lambda one: one.factor, default=None)
