"""In: the seconds of each step. Out: a sentence for people when steps have become slow.
Does not look for the cause, and changes nothing."""

from __future__ import annotations

import math
import statistics

SLOW = 2.0
"""Steps are slow if they take this many times as long as the fastest."""

WINDOW = 10
"""Steps whose median is compared: one slow step is no reason."""


class SlowSteps:
    """Compares the median of the last steps with that of the fastest ones. After each sentence it waits longer."""

    def __init__(self) -> None:
        self._window: list[float] = []
        self._fastest_s = math.inf  # the shortest median of a window
        self._windows, self._wait = 0, 1  # windows since the last sentence, and how many must pass before the next

    def add(self, seconds: float) -> str | None:
        """Count a step. Returns what to say; None: steps are not slow, or it was said lately."""
        self._window.append(seconds)
        if len(self._window) < WINDOW:
            return None
        median_s, self._window = statistics.median(self._window), []
        self._fastest_s = min(self._fastest_s, median_s)
        self._windows += 1
        if median_s < SLOW * self._fastest_s or self._windows < self._wait:
            return None
        self._windows, self._wait = 0, 2 * self._wait
        return (
            f"the last {WINDOW} steps took {median_s / self._fastest_s:.1f} times as long as the fastest {WINDOW}: "
            "other programs may use these cores or this device, or the network has become slower"
        )
