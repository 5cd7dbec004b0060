"""In: a few samples of a quantity, on one side or two. Out: their mean or difference with Student's interval.
Does not know what was measured. For a few samples the bootstrap's intervals (statistics.py) are too narrow."""

from __future__ import annotations

import math

import numpy as np

from codescent.results.statistics import LEVEL, Interval, Values

MOST_CORRELATED = 0.8
"""Largest correlation of consecutive samples that is taken into account: a few samples cannot show a larger one."""


def quantile(level: float, freedom: int) -> float:
    """The t with P(|T| <= t) = level for Student's distribution (Abramowitz & Stegun 1964, 26.7.3 and 26.7.4).

    `freedom`: degrees of freedom, at least 1.
    """
    low, high = 0.0, math.pi / 2
    for _ in range(60):  # theta = atan(t / sqrt(freedom)), by bisection: the probability grows with it
        middle = (low + high) / 2
        low, high = (middle, high) if _probability(middle, freedom) < level else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def _probability(theta: float, freedom: int) -> float:
    """P(|T| <= sqrt(freedom) tan(theta))."""
    sine, cosine = math.sin(theta), math.cos(theta)
    odd = freedom % 2
    term, total = (cosine, 0.0) if odd else (1.0, 0.0)
    for number in range(1 + odd, freedom, 2):  # cos + 2/3 cos^3 + ..., or 1 + 1/2 cos^2 + ...
        total += term
        term *= cosine**2 * number / (number + 1)
    return 2 / math.pi * (theta + sine * total) if odd else sine * total


def mean(values: Values, level: float = LEVEL, *, serial: bool = False) -> Interval:
    """The mean of samples and its interval. NaN ends for fewer than two samples.

    Args:
        values: samples of one quantity, in order of time.
        level: probability of the interval.
        serial: consecutive samples may be correlated: the interval is widened.
    """
    return _interval(float(values.mean()), [values], level, serial)


def difference(a: Values, b: Values, level: float = LEVEL, *, serial: bool = False) -> Interval:
    """The mean of b less the mean of a, and its interval (Welch 1947). NaN ends: a side has fewer than two samples.

    For the arguments see `mean`.
    """
    return _interval(float(b.mean() - a.mean()), [a, b], level, serial)


def _interval(value: float, sides: list[Values], level: float, serial: bool) -> Interval:
    """`value` plus and minus t standard errors; the degrees of freedom by Satterthwaite (1946), rounded down."""
    if any(len(side) < 2 for side in sides):
        return Interval(value, math.nan, math.nan)
    variances = [float(side.var(ddof=1)) / len(side) for side in sides]
    total = sum(variances)
    if total == 0:
        return Interval(value, value, value)
    shares = sum((of_side / total) ** 2 / (len(side) - 1) for of_side, side in zip(variances, sides, strict=True))
    half = quantile(level, max(1, int(1 / shares + 1e-9))) * math.sqrt(total) * (_widening(sides) if serial else 1.0)
    return Interval(value, value - half, value + half)


def _widening(sides: list[Values]) -> float:
    """The factor by which correlated samples widen an interval: sqrt((1 + r) / (1 - r)) for an AR(1) process.

    r is the correlation of consecutive samples, pooled over the sides; 1 / n makes up for its bias (Kendall 1954).
    """
    centred = [side - side.mean() for side in sides]
    squares = sum(float((side * side).sum()) for side in centred)
    products = sum(float((side[1:] * side[:-1]).sum()) for side in centred)
    bias = len(sides) / sum(len(side) for side in sides)
    correlation = float(np.clip(products / squares + bias, 0.0, MOST_CORRELATED))
    return math.sqrt((1 + correlation) / (1 - correlation))
