"""In: seconds of repeats. Out: their median, with the 10 and 90 % quantiles; how numbers of several ranks are joined.
Does not take the time (timer.py does)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LOW, HIGH = 0.1, 0.9


@dataclass(frozen=True)
class Spread:
    """A number that was measured again and again.

    Attributes:
        median: of the repeats.
        low, high: their 10 and 90 % quantiles.
        repeats: how many there were.
    """

    median: float
    low: float
    high: float
    repeats: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one number."""
        low, median, high = (float(one) for one in np.quantile(values, (LOW, 0.5, HIGH)))
        return cls(median, low, high, len(values))

    @classmethod
    def joined(cls, ranks: Sequence[Spread]) -> Spread:
        """What ranks measured at the same time: the median of each number over at least one rank."""
        names = ("median", "low", "high")
        median, low, high = (statistics.median(getattr(one, name) for one in ranks) for name in names)
        return cls(median, low, high, min(one.repeats for one in ranks))

    @classmethod
    def summed(cls, parts: Sequence[Spread]) -> Spread:
        """Of what consists of these parts: slow repeats of all of them at once, and quick ones."""
        median, low, high = (sum(getattr(one, name) for one in parts) for name in ("median", "low", "high"))
        return cls(median, low, high, min(one.repeats for one in parts))

    def per_second(self, amount: float) -> Spread:
        """The rate at which so much is done, where this one is of seconds."""
        return Spread(amount / self.median, amount / self.high, amount / self.low, self.repeats)

    def times(self, factor: float) -> Spread:
        """Each number multiplied by a factor above 0."""
        return Spread(factor * self.median, factor * self.low, factor * self.high, self.repeats)
