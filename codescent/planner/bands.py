"""In: a predicted number, a band of its software. Out: between which numbers 8 of 10 measured ones lie.
Does not predict, and does not measure a band (fitted.py does)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

LOW, HIGH = 0.1, 0.9
"""Quantiles of a band."""
ENOUGH = 4
"""Fewest residuals that say something of their 10 and 90 % quantiles."""


class Band(NamedTuple):
    """The 10 and 90 % quantiles of what may be measured."""

    low: float
    high: float

    def words(self, shown: Callable[[float], str]) -> str:
        """Such as "41.2 to 58.6 ms": a unit that both have stands once."""
        low, high = shown(self.low), shown(self.high)
        number, _, unit = low.rpartition(" ")
        return f"{number if unit and unit == high.rpartition(' ')[2] else low} to {high}"


def grows(value: float, band: tuple[float, float]) -> Band:
    """Of a number in proportion to what the band is of, such as seconds."""
    return Band(value * band[0], value * band[1])


def falls(value: float, band: tuple[float, float]) -> Band:
    """Of a number in inverse proportion to it, such as tokens per second."""
    return Band(value / band[1], value / band[0])


def band_of(residuals: Sequence[float], least: float) -> tuple[float, float] | None:
    """The band that residuals have; None: they are too few.

    Args:
        residuals: logarithms of measured over predicted.
        least: it is no narrower than this many to both sides of 1, as a logarithm.
    """
    if len(residuals) < ENOUGH:
        return None
    low, high = np.quantile(residuals, [LOW, HIGH])
    return float(np.exp(min(low, -least))), float(np.exp(max(high, least)))
