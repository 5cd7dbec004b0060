"""In: the pages of ranks, again and again. Out: how long a rank may stand still before it counts as hanging.
Does not decide that it hangs (supervisor.py does). No key sets it: the run itself says how long its parts take."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from statistics import median

from codescent.base.page import Page
from codescent.base.progress import ANSWERS, ENDED, PREPARATION, SCRIPT

FACTOR, FLOOR_S = 5.0, 6.0
"""A deadline is this factor times the median of the part so far, and no less than the floor."""
START_S, FIRST_S = 600.0, 300.0
"""Before the first step; and in a part that has not ended once, such as a first step that compiles, a first save."""
MOST_S = 600.0
"""The cap, where parallel.timeout_s is not known."""
UNBOUNDED = {SCRIPT, PREPARATION, ANSWERS}
"""Sections of which nobody knows how long they take: an own loop before its first step, the preparation of data, the
answers of a model with their rewards, which have a limit of their own."""
KEPT = 50


class Deadlines:
    """How long steps and sections of a run take.

    Args:
        most_s: the cap of every deadline (parallel.timeout_s); None: MOST_S.
    """

    def __init__(self, most_s: float | None = None) -> None:
        self._most_s = most_s or MOST_S
        self._steps: deque[float] = deque(maxlen=KEPT)
        self._sections: dict[str, deque[float]] = {}
        self._counts: dict[tuple[int, str], int] = {}
        self._stepped: set[int] = set()  # ranks of which a step was seen to end
        self._last: dict[int, tuple[int, float]] = {}  # of each rank: steps that are done, and when that was seen

    def learn(self, pages: Mapping[int, Page], now_s: float) -> None:
        """Take in what the pages say of parts that have ended."""
        for rank, page in pages.items():
            for name, often, seconds in page.spent:
                if self._counts.get((rank, name), 0) != often:
                    self._counts[rank, name] = often
                    self._sections.setdefault(name, deque(maxlen=KEPT)).append(seconds)
            if page.position == ENDED:
                continue
            if rank not in self._stepped and page.took.steps > 1:
                self._steps.append(page.took.work_s / page.took.steps)  # all that is known of steps by now
            steps, (before, seen_s) = int(page.position), self._last.get(rank, (int(page.position), now_s))
            if steps > before:
                if rank in self._stepped:
                    self._steps.append((now_s - seen_s) / (steps - before))
                self._stepped.add(rank)  # the start and the first step, which compiles, are no step
            if steps != before or rank not in self._last:
                self._last[rank] = steps, now_s

    def of(self, page: Page) -> float:
        """Seconds that a rank may stand still where it is now."""
        if page.section in UNBOUNDED:
            return math.inf
        if page.section:
            return self._bounded(self._sections.get(page.section, ()), FIRST_S)
        if not page.position:  # it begins, perhaps anew: steps of before say nothing of it
            return self._bounded((), START_S)
        return self._bounded(self._steps, FIRST_S)

    def _bounded(self, seen: Iterable[float], unseen_s: float) -> float:
        values = list(seen)
        wanted_s = FACTOR * median(values) if values else unseen_s
        return max(FLOOR_S, min(wanted_s, self._most_s))
