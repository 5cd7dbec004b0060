"""In: nothing. Out: a clock that stands still, in place of the module `time`.
Does not pass time: a test sets `now_s`."""

from __future__ import annotations


class Clock:
    """`monotonic` gives `now_s`, in seconds."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def monotonic(self) -> float:
        """See time.monotonic."""
        return self.now_s
