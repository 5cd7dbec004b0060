"""In: numbers of requests, in the order of time. Out: windows of them, and whether these differ by more than chance.
Does not read logs (answered.py does) or draw."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from codescent.results.answered import AnsweredPrompt

LEAST = 30
"""A window has at least so many prompts: of fewer, the formulas below say little."""
MOST_WINDOWS = 12
SURE = 0.01
"""A difference is called drift if it has at most this probability without one, over all windows together."""
Z = 1.96
"""Of an interval of 95 %."""


@dataclass(frozen=True)
class RequestWindow:
    """Prompts that follow each other.

    Attributes:
        prompts: they.
        loss: the mean loss of their tokens but the first ones, in nats; NaN: no prompt has two tokens.
        error: the standard error of `loss`, of prompts that are independent; NaN: of fewer than two.
        distance: of their lengths from those of the first window: Kolmogorov-Smirnov's D, in [0, 1].
        chance: the probability of such a distance without drift.
        loss_chance: the probability of such a difference of losses without drift; NaN: there is no loss.
    """

    prompts: Sequence[AnsweredPrompt]
    loss: float
    error: float
    distance: float
    chance: float
    loss_chance: float

    @property
    def interval(self) -> tuple[float, float]:
        """95 % of the mean loss."""
        return self.loss - Z * self.error, self.loss + Z * self.error


def windows(prompts: Sequence[AnsweredPrompt]) -> list[RequestWindow]:
    """Windows of equally many prompts, at most MOST_WINDOWS; each is compared with the first. []: there are too few."""
    count = min(MOST_WINDOWS, len(prompts) // LEAST)
    if not count:
        return []
    parts = [[prompts[at] for at in part] for part in np.array_split(np.arange(len(prompts)), count)]
    first = _loss(parts[0])
    found = []
    for part in parts:
        mean, error = _loss(part)
        distance = two_samples([one.prompt_tokens for one in parts[0]], [one.prompt_tokens for one in part])
        apart, spread = abs(mean - first[0]), math.hypot(error, first[1])
        far = apart / spread if spread else math.inf if apart else 0.0
        by_chance = chance(distance, len(parts[0]), len(part))
        found.append(RequestWindow(part, mean, error, distance, by_chance, math.erfc(far / math.sqrt(2.0))))
    return found


def _loss(prompts: Sequence[AnsweredPrompt]) -> tuple[float, float]:
    """The mean loss per token, and its standard error: that of a ratio of sums over prompts (Cochran 1977, 6.4)."""
    known = [one for one in prompts if math.isfinite(one.loss)]
    weights = np.array([one.prompt_tokens - 1 for one in known], np.float64)
    losses = np.array([one.loss for one in known], np.float64)
    if not len(known):
        return math.nan, math.nan
    mean = float((weights * losses).sum() / weights.sum())
    if len(known) < 2:
        return mean, math.nan
    residuals = weights * (losses - mean)
    return mean, float(np.sqrt((residuals**2).sum() * len(known) / (len(known) - 1)) / weights.sum())


def two_samples(some: Sequence[float], others: Sequence[float]) -> float:
    """Kolmogorov-Smirnov's D: the largest difference of the distribution functions of two samples."""
    a, b = (np.sort(np.asarray(one, np.float64)) for one in (some, others))
    values = np.concatenate([a, b])
    return float(np.abs(_share_at_most(a, values) - _share_at_most(b, values)).max())


def _share_at_most(sample: npt.NDArray[np.float64], values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    shares: npt.NDArray[np.float64] = np.searchsorted(sample, values, side="right") / len(sample)
    return shares


def chance(distance: float, count: int, other: int) -> float:
    """The probability of at least this D of two samples of one distribution (Stephens 1970; too large with ties)."""
    effective = math.sqrt(count * other / (count + other))
    far = (effective + 0.12 + 0.11 / effective) * distance
    if far < 0.2:  # the series converges slowly, and its sum is 1 to nine digits
        return 1.0
    series = sum(2.0 * (-1.0) ** (k - 1) * math.exp(-2.0 * k * k * far * far) for k in range(1, 101))
    return min(1.0, max(0.0, series))
