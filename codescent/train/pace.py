"""In: the seconds of steps. Out: sentences for people: how long the run will take, and that steps have become slow.
Does not print, changes nothing, and does not measure the speed of the processor (machine.py does)."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from codescent.base.counted import counted
from codescent.train.display import clock

MEASURED_S, MEASURED_STEPS = 5.0, 3
"""The estimate is made after so many seconds and steps. The first step does not count: it warms up."""
WORTH_SAYING_S = 20.0
"""A shorter rest of the run is not announced."""
HELD_BACK = 0.1
"""The least share of waiting for a core that is blamed on other programs."""

SLOW = 2.0
"""Steps are slow if they take this many times as long as the fastest."""

WINDOW = 10
"""Steps whose median is compared: one slow step is no reason."""

TASKS = Path("/proc/self/task")


class Estimate:
    """The time that a run will take, measured once over its first steps.

    Args:
        num_steps: steps that the run takes from now on: on resume those that are left.
        first_step: the steps that it had taken before.
        flops: of a step, of this rank.
        peak_flops_per_s: of this rank's matrix products.
        num_threads: of this rank.
        expected_minutes: log.expected_minutes.
        now: the clock, in seconds.
    """

    def __init__(
        self,
        num_steps: int,
        first_step: int,
        flops: float,
        peak_flops_per_s: float,
        num_threads: int,
        expected_minutes: float | None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_steps, self.flops, self.peak, self.num_threads = num_steps, flops, peak_flops_per_s, num_threads
        self.last_step = first_step + num_steps
        self.expected_s, self.now = None if expected_minutes is None else 60 * expected_minutes, now
        self.first: tuple[int, float, float] | None = None  # step, clock, seconds of waiting for a core
        self.made = False

    def after(self, step: int) -> str | None:
        """A sentence after the step with which enough is measured; None after all other steps."""
        if self.made:
            return None
        if self.first is None:
            self.first = (step, self.now(), waited_s())
            return None
        begin, start_s, before_s = self.first
        measured_s, steps = self.now() - start_s, step - begin
        if measured_s < MEASURED_S or steps < MEASURED_STEPS:
            return None
        self.made = True
        step_s = measured_s / steps
        if (self.last_step - step) * step_s < WORTH_SAYING_S:
            return None
        text = f"about {clock(self.num_steps * step_s)} for {counted(self.num_steps, 'step')} of {_seconds(step_s)}"
        if self.expected_s is None or self.num_steps * step_s <= self.expected_s:
            return text
        held_back = max(0.0, waited_s() - before_s) / (measured_s * self.num_threads)
        return f"{text}; {self._why(step_s, held_back, self.expected_s)}"

    def _why(self, step_s: float, held_back: float, expected_s: float) -> str:
        """Why a run takes longer than expected.

        Args:
            step_s: seconds of a step.
            held_back: share of the time in which a thread of this process could run and waited for a core.
            expected_s: log.expected_minutes, in seconds.
        """
        needed = self.num_steps * self.flops / expected_s
        if held_back >= HELD_BACK:
            threads = counted(self.num_threads, "thread")
            why = f"other programs kept its {threads} waiting for a core {held_back:.0%} of the time"
        elif self.peak < needed:
            why = f"this processor's matrix products reach {_gflops(self.peak)}, which is too slow"
        else:
            why = "a step does more than matrix products, or its products are small"
        return (
            f"more than the {expected_s / 60:g} minutes of log.expected_minutes: {why} (products {_gflops(self.peak)}, "
            f"the run {_gflops(self.flops / step_s)}, needed {_gflops(needed)})"
        )


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


def waited_s() -> float:
    """Seconds in which threads of this process could run and waited for a core; 0 where the kernel does not count them.

    The second number of /proc/PID/schedstat (https://docs.kernel.org/scheduler/sched-stats.html), in nanoseconds.
    """
    waited_ns = 0
    for task in TASKS.glob("*/schedstat"):
        try:
            waited_ns += int(task.read_text().split()[1])
        except (OSError, IndexError, ValueError):  # the thread has just ended
            continue
    return waited_ns / 1e9


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"


def _gflops(flops_per_s: float) -> str:
    return f"{flops_per_s / 1e9:,.0f} GFLOP/s"
