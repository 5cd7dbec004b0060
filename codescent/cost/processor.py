"""In: a clock, seconds of work. Out: a processor that does one thing at a time, in the order in which it was asked.
Does not know what it computes (ranks_walk.py does)."""

from __future__ import annotations

from codescent.cost.events import Clock, Process


class Processor:
    """The processor of a rank. Its arithmetic, and the coding of messages in a thread beside it, take turns."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.free_s = 0.0

    def work(self, seconds: float) -> Process:
        """Compute for so long, after what was asked before."""
        if seconds:
            self.free_s = max(self.clock.now_s, self.free_s) + seconds
            yield self.free_s - self.clock.now_s
