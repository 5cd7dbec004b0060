"""In: processes, as generators that wait. Out: a clock that runs them in order of time.
Knows no ranks and no links (ranks_walk.py and network.py do) and measures nothing."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator
from functools import partial


class Event:
    """Something that happens once. `at_s` is None until then.

    `begun_s`: when what ends with it began, such as a message when it left; None: not known. Who waits for it waits
    before for another rank.
    """

    def __init__(self) -> None:
        self.at_s: float | None = None
        self.begun_s: float | None = None
        self.waiting: list[Process] = []


Process = Generator[Event | float, None, None]
"""Yields the event for which it waits, or the seconds that pass."""


class Clock:
    """Simulated time. What happens at the same time happens in the order in which it was asked for."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.due: list[tuple[float, int, Callable[[], None]]] = []
        self.count = 0

    def start(self, process: Process) -> None:
        """Run a process from now on, up to its first wait at once."""
        for wanted in process:
            if isinstance(wanted, Event):
                if wanted.at_s is None:
                    wanted.waiting.append(process)
                    return
            elif wanted > 0:
                self._after(wanted, partial(self.start, process))
                return

    def happens(self, event: Event) -> None:
        """Let an event happen now: the processes that wait for it go on, after the one that calls this."""
        event.at_s = self.now_s
        waiting, event.waiting = event.waiting, []
        for process in waiting:
            self._after(0.0, partial(self.start, process))

    def run(self) -> None:
        """Run until nothing is due. A process that still waits then waits forever."""
        while self.due:
            self.now_s, _, call = heapq.heappop(self.due)
            call()

    def _after(self, seconds: float, call: Callable[[], None]) -> None:
        heapq.heappush(self.due, (self.now_s + seconds, self.count, call))
        self.count += 1
