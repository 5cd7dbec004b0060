"""In: the deaths of ranks, as they come. Out: whether the run goes on after each, or the reason why it ends.
Does not start or end a rank (local.py does)."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

TOGETHER_S = 1.0
"""Deaths within so many seconds are one loss."""
IDLE_STARTS = 2
"""A run ends that has lost ranks after so many starts in a row without a finished step: it would be so for ever."""


@dataclass
class LossCount:
    """How often ranks are started again that have died: all ranks of a run together, or one that the run can lose.

    Attributes:
        most: losses within `window_s` after which the run goes on (survive.max_restarts).
        window_s: survive.restart_window_s.
        batch: samples of a step, for the message; 0: not known.
        key: of the config, that says `most`.
        together_s: deaths within so many seconds are one loss; 0: each death of one rank is one.
        count: of all losses after which the run went on.
    """

    most: int
    window_s: float
    batch: int
    key: str = "survive.max_restarts"
    together_s: float = TOGETHER_S
    count: int = 0
    _times: deque[float] = field(default_factory=deque)
    _idle: int = 0
    _counted_s: float = -math.inf

    def add(self, now_s: float, *, step: int | None, progressed: bool) -> str:
        """Ranks have died. Returns why the run ends, in words; "": it goes on.

        Args:
            now_s: by time.monotonic.
            step: that was under way, from 1; None: none was.
            progressed: a step was done since the ranks met.
        """
        if now_s - self._counted_s < self.together_s:
            return ""
        self._counted_s = now_s
        self._idle = 0 if progressed else self._idle + 1
        while self._times and self._times[0] <= now_s - self.window_s:
            self._times.popleft()
        if self._idle >= IDLE_STARTS:
            return f"{IDLE_STARTS} starts in a row lost ranks before they had done a step{self._at(step)}"
        if len(self._times) >= self.most:
            more = f"it is one loss of ranks more within {self.window_s:g} s"
            return f"{self.key} = {self.most}: {more}{self._at(step)}"
        self._times.append(now_s)
        self.count += 1
        return ""

    def __str__(self) -> str:
        return f"{len(self._times)} of {self.most}"

    def _at(self, step: int | None) -> str:
        if step is None:
            return ""
        samples = f", with samples {(step - 1) * self.batch + 1} to {step * self.batch}" if self.batch else ""
        return f"; step {step} was under way{samples}"
