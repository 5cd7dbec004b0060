"""In: the mean time between failures of a run, the seconds of a checkpoint. Out: the best interval of checkpoints.
Does not know how often machines fail (the user says it) and does not measure a checkpoint."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class SaveInterval:
    """How often a run saves, and the share of the time in which it trains."""

    seconds: float
    effective: float


def best_interval(mtbf_s: float, save_s: float) -> SaveInterval:
    """The interval with the least time that is lost.

    With M seconds between failures and d seconds of a checkpoint it is sqrt(2 d M) - d (Young 1974, "A first order
    approximation to the optimum checkpoint interval"; Daly 2006, "A higher order estimate of the optimum checkpoint
    interval", equation 20 without its last terms). A run loses d of each interval, and at a failure half an interval
    and a start. Where d is more than M / 2, no interval helps: it is M then.

    Args:
        mtbf_s: of the whole run, not of a device: with n devices it is that of one, divided by n.
        save_s: in which training waits.
    """
    if save_s >= mtbf_s / 2:
        return SaveInterval(mtbf_s, math.exp(-1.0))
    seconds = math.sqrt(2 * save_s * mtbf_s) - save_s
    period = seconds + save_s
    # Exponential failures: a period of work succeeds with probability exp(-period / M); else it is done again.
    effective = seconds / (mtbf_s * math.expm1(period / mtbf_s))
    return SaveInterval(seconds, effective)
