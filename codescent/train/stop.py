"""In: SIGINT, SIGTERM and SIGHUP. Out: the wish to stop, which the ranks share, and the exit code that says so.
Does not save or exit: the loop does, after the step in which every rank has learnt of the wish."""

from __future__ import annotations

import signal
import time
from types import FrameType
from typing import Any

AGAIN_S = 0.5
"""One Ctrl-C reaches a rank more than once (from the terminal and from its launcher); a second one comes later."""


STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C; a scheduler or `kill`; the end of the terminal (unless nohup has seen to that)."""


class StopRequest:
    """Turns the first of them into a wish; a second Ctrl-C, typed by hand, stops at once.

    Schedulers send SIGTERM several times, so only SIGINT insists, and only in a run of one rank (`alone`): several
    ranks are stopped by whoever started them.
    """

    def __init__(self, *, alone: bool) -> None:
        self.alone = alone
        self.signal: int | None = None
        self._first = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        for number in STOPPING:
            # nohup asks to outlive the terminal. A shell's `&` ignores SIGINT, too, but who sends that one means it.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._asked)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _asked(self, number: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal, self._first = number, time.monotonic()
        elif self.alone and number == signal.SIGINT and time.monotonic() - self._first > AGAIN_S:
            raise KeyboardInterrupt

    def wished(self) -> bool:
        """Whether this rank was asked to stop."""
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """128 + the signal, as a shell reports it; SIGINT where another rank was the one to be asked."""
        return 128 + (self.signal or signal.SIGINT)
