"""In: how long each worker took for its steps. Out: how many steps a worker takes before its next push.
Does not measure and reads no clock."""

from __future__ import annotations


class Speeds:
    """Steps by speed: a worker takes as many steps as it can while the fastest one takes `period`.

    Liu et al. 2024, "Asynchronous local-SGD training for language modeling" (arXiv 2401.09135), dynamic local updates:
    the steps of worker i are floor(v_i / max v * period), at least 1. A worker without a measurement takes all.

    Raises:
        ValueError: `period` is below 1.
    """

    def __init__(self, period: int) -> None:
        if period < 1:
            raise ValueError(f"period {period}")
        self._period = period
        self._speeds: dict[int, float] = {}

    def record(self, worker: int, steps: int, seconds: float) -> None:
        """Remember the last measurement of a worker."""
        if steps > 0 and seconds > 0:
            self._speeds[worker] = steps / seconds

    def steps(self, worker: int) -> int:
        """Steps of the worker before its next push."""
        speed = self._speeds.get(worker)
        if speed is None:
            return self._period
        # Equal speeds never measure equally: noise of a few percent must not cost a step of a long round.
        share = min(1.0, speed / max(self._speeds.values()) * 1.05)
        return max(1, int(share * self._period))
