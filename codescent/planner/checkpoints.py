"""In: the mean time between failures of a run, the seconds of a checkpoint. Out: the best interval of checkpoints.
Does not know how often machines fail (the user says it) and does not measure a checkpoint."""

from __future__ import annotations

import math
from dataclasses import dataclass

TURNS = 10_000
"""A fixed point is approached from above: so many turns reach it where a failure is a thousand checkpoints away."""
MOST = 500.0
"""More mean times between failures in a period: no run ever saves."""


@dataclass(frozen=True)
class SaveInterval:
    """How often a run saves, and the share of the time in which it trains."""

    seconds: float
    effective: float


def best_interval(mtbf_s: float, save_s: float) -> SaveInterval:
    """The interval s with which the largest share of the time trains.

    Failures come at random, M seconds apart in the mean, and a checkpoint takes d seconds. Then a share of
    s / (M (exp((s + d) / M) - 1)) trains (Daly 2006, "A higher order estimate of the optimum checkpoint interval for
    restart dumps", equation 16, without the time of a start, which does not change the interval). Its maximum is where
    s = M (1 - exp(-(s + d) / M)). Where d is short, that is about sqrt(2 d M) - d (Young 1974).

    Args:
        mtbf_s: of the whole run, not of a device: with n devices it is that of one, divided by n.
        save_s: in which training waits.
    """
    seconds = mtbf_s
    for _ in range(TURNS):
        seconds = mtbf_s * -math.expm1(-(seconds + save_s) / mtbf_s)
    lost = min(MOST, (seconds + save_s) / mtbf_s)
    return SaveInterval(seconds, seconds / (mtbf_s * math.expm1(lost)))
