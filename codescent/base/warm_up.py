"""In: how many steps runs have done. Out: how many of the first ones no speed counts.
Does not read runs and does not compute a speed (those that call it do)."""

from __future__ import annotations

SHARE, LEAST, MOST = 10, 5, 50
"""A tenth of the steps, at least 5, at most 50. Caches are cold then, memory is allocated, and kernels are chosen."""
FEW = 5
"""Of a run whose whole warm-up is not shorter than it, one of so many steps is left out."""


def wanted(steps: int) -> int:
    """The warm-up of a run with so many steps, which may be longer than the run."""
    return min(MOST, max(LEAST, steps // SHARE))


def within(steps: int, warmup: int | None = None) -> int:
    """The steps that are left out of a run, so that some remain.

    Args:
        steps: done.
        warmup: to leave out, if the run is longer; None: `wanted`.
    """
    first = wanted(steps) if warmup is None else warmup
    return first if first < steps else steps // FEW
