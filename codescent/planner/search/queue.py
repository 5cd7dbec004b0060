"""In: lower bounds, each with what would make it closer. Out: what is to be done next: where the bound is least.
Does not know what is bounded. Best-first branch and bound (Land and Doig 1960; Lawler and Wood 1966)."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

Action = Callable[[], None]
"""Makes a bound closer, or finds a value: it may add to the queue."""


class Queue:
    """Actions by their bounds."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Action]] = []
        self._added = 0  # of equal bounds the first one comes first

    @property
    def least(self) -> float:
        """The least bound; inf: nothing is left."""
        return self._heap[0][0] if self._heap else math.inf

    def add(self, bound: float, action: Action) -> None:
        """Add an action. All that it may find is at least `bound`."""
        heapq.heappush(self._heap, (bound, self._added, action))
        self._added += 1

    def until(self, limit: Callable[[], float]) -> None:
        """Act while a bound is below the limit, which may fall."""
        while self._heap and self._heap[0][0] < limit():
            heapq.heappop(self._heap)[2]()
