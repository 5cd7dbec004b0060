"""In: when each worker arrived in past rounds. Out: how long to wait for the others after a quorum has arrived.
Does not wait and reads no clock."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence

SPREADS = 6.0
"""The deadline is this many standard deviations after the median: noise of an even load stays within it."""
SIGMA_PER_MAD = 1.4826
"""Standard deviation of a normal distribution, in median absolute deviations (Rousseeuw and Croux 1993, section 1)."""


class Arrivals:
    """Learns when the workers of a round usually arrive.

    The deadline is median + SPREADS standard deviations of all arrivals in the last rounds. Median and MAD ignore
    outliers: as long as fewer than half of the workers are slow, a slow one does not move the deadline to itself.

    Args:
        floor_s: least time to wait after the quorum, in seconds.
        window: rounds that are remembered.
        rounds: rounds with a deadline of infinity at the beginning, while nothing is known.

    Raises:
        ValueError: `floor_s` is negative, or `rounds` is not in 1 to `window`.
    """

    def __init__(self, floor_s: float, window: int = 16, rounds: int = 2) -> None:
        if not floor_s >= 0 or not 1 <= rounds <= window:
            raise ValueError(f"floor_s {floor_s}, window {window}, rounds {rounds}")
        self._floor_s, self._rounds = floor_s, rounds
        self._past: deque[list[float]] = deque(maxlen=window)

    def record(self, arrived_s: Sequence[float | None]) -> None:
        """Remember a round: seconds from its beginning to each worker's arrival; None: it did not arrive in time."""
        self._past.append([math.inf if seconds is None else seconds for seconds in arrived_s])

    def deadline_s(self) -> float:
        """Seconds from a round's beginning to the usual last arrival. Infinity: not known."""
        seconds = [one for past in self._past for one in past]
        if len(self._past) < self._rounds or not seconds:
            return math.inf
        median = statistics.median_low(seconds)  # of two middle values one may be infinite
        if math.isinf(median):
            return math.inf
        spread = statistics.median_low([abs(one - median) for one in seconds])
        return median + SPREADS * SIGMA_PER_MAD * spread

    def wait_s(self, quorum_s: float) -> float:
        """How long to wait for the others, in seconds, from the moment when the quorum is complete.

        Args:
            quorum_s: seconds from the round's beginning to that moment.
        """
        return max(self._floor_s, self.deadline_s() - quorum_s)
