"""In: measured numbers. Out: their median with an interval by the bootstrap, and how far they spread.
Does not know what was measured. The same numbers always give the same interval."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

LEVEL = 0.95
"""Probability of an interval."""
MANY = 100
"""So many values need no bootstrap for their median."""
NORMAL = 1.96
"""Standard deviations on both sides of a normal mean that have the probability LEVEL."""
RESAMPLES = 2000
"""Resamples of the bootstrap: the ends of a 95 % interval are then known to about 5 % of its width."""

Values = npt.NDArray[np.float64]
Statistic = Callable[..., Values]
"""A function of arrays [resamples, values] that gives one number per resample."""


class Interval(NamedTuple):
    """A number, and the ends of its interval. `low` and `high` are NaN if one value allows no interval."""

    value: float
    low: float
    high: float

    @property
    def half(self) -> float:
        """Half its width; NaN without an interval."""
        return (self.high - self.low) / 2

    def contains(self, value: float) -> bool:
        """Whether a value lies in the interval; without an interval it does."""
        return not (value < self.low or value > self.high)


def medians(values: Values) -> Values:
    """The median of each resample."""
    return np.asarray(np.median(values, axis=-1))


def bootstrap(*samples: Sequence[float] | Values, statistic: Statistic = medians, seed: int = 0) -> Interval:
    """A statistic of samples, and its percentile interval (Efron & Tibshirani 1993, chapter 13).

    Args:
        samples: one or several samples, each of at least one number; they are resampled independently of each other.
        statistic: gets an array [resamples, values] per sample; e.g. a ratio of medians of two samples.
        seed: of the resampling.

    Raises ValueError: a sample is empty.
    """
    given = [np.asarray(sample, dtype=np.float64) for sample in samples]
    if any(not len(sample) for sample in given):
        raise ValueError("a sample without numbers")
    value = float(statistic(*(sample[None] for sample in given))[0])
    if any(len(sample) < 2 for sample in given):
        return Interval(value, np.nan, np.nan)
    generator = np.random.default_rng(seed)
    drawn = [sample[generator.integers(len(sample), size=(RESAMPLES, len(sample)))] for sample in given]
    low, high = np.quantile(statistic(*drawn), ((1 - LEVEL) / 2, (1 + LEVEL) / 2))
    return Interval(value, float(low), float(high))


def rate(work: Sequence[float] | Values, seconds: Sequence[float] | Values) -> Interval:
    """Work per second: the median of the work over the median of the seconds, so that rates and times agree.

    A median of quotients is another number when the repeats are even in number. Work and seconds of one repeat are
    resampled together. Raises ValueError: no value.
    """
    amounts, times = (np.asarray(values, dtype=np.float64) for values in (work, seconds))

    def quotient(chosen: Values) -> Values:
        index = chosen.astype(int)
        return medians(amounts[index]) / medians(times[index])

    return bootstrap(np.arange(len(times), dtype=np.float64), statistic=quotient)


def median_of_many(values: Sequence[float] | Values) -> Interval:
    """The median of values, and its interval; of at least MANY values by order statistics, which is as good and fast.

    The k-th smallest values with k = (n -+ 1.96 sqrt(n)) / 2 enclose the median, whatever the distribution (Conover
    1999, "Practical Nonparametric Statistics", 3.2). Raises ValueError: no value.
    """
    found = np.sort(np.asarray(values, dtype=np.float64))
    if len(found) < MANY:
        return bootstrap(found)
    half = NORMAL * np.sqrt(len(found)) / 2
    low, high = int(np.floor(len(found) / 2 - half)), int(np.ceil(len(found) / 2 + half))
    return Interval(float(np.median(found)), float(found[low]), float(found[high]))


def spread(values: Sequence[float] | Values) -> float:
    """(largest - smallest) / median; 0 for one value."""
    found = np.asarray(values, dtype=np.float64)
    return float((found.max() - found.min()) / np.median(found)) if len(found) else 0.0
