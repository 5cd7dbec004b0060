"""In: the parts of a step as they end, and the blocks in which this rank waits for other ranks. Out: seconds of each.
Does not know which parts a step has (train/execute.py does)."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

from codescent.base.device import new_event, offered
from codescent.base.range_names import WAITING
from codescent.base.ranges import named

Mark = Any
"""The moment at which a lap ends: an event, or seconds on a device that has none."""


class Laps:
    """The laps of one step, which a device may still be computing.

    Args:
        marks: each lap's part and end. The first mark begins the first lap.
        events: marks are events.
    """

    def __init__(self, marks: list[tuple[str, Mark]], *, events: bool) -> None:
        self.marks, self.events = marks, events
        self.next_begin: Mark = None  # of the next step, if that began before this one was read

    def read(self) -> dict[str, float]:
        """The seconds of each part. Waits until the device has computed the last lap."""
        if self.events and self.marks:
            self.marks[-1][1].synchronize()
        seconds: dict[str, float] = {}
        for (_, begin), (part, end) in zip(self.marks, self.marks[1:]):
            seconds[part] = seconds.get(part, 0.0) + self._between(begin, end)
        return seconds

    def step_s(self) -> float:
        """The seconds from the begin of the first lap to the begin of the next step, or, if none has begun, to now.

        With events "now" is the end of the last lap: a device that nothing follows waits for the host. It waits for
        the end.
        """
        if not self.marks:
            return 0.0
        end: Mark = self.next_begin
        if end is None:
            end = self.marks[-1][1] if self.events else time.perf_counter()
        if self.events:
            end.synchronize()
        return self._between(self.marks[0][1], end)

    def _between(self, begin: Mark, end: Mark) -> float:
        return float(begin.elapsed_time(end) / 1e3 if self.events else end - begin)


class Stopwatch:
    """Measures the seconds between laps. Where a device has events it records them: the host does not wait for it.

    A part is the name to which time is charged. Time inside `waiting` is charged to `waits`, whatever part is running.

    Attributes:
        part: the running part.
        running: the stopwatch of the step that this process takes now; None: it takes none.
    """

    running: ClassVar[Stopwatch | None] = None

    def __init__(self, device: torch.device, waits: str) -> None:
        self.device, self.events, self.waits = device, offered(device).events, waits
        self.laps: list[tuple[str, Mark]] = []
        self.before: Laps | None = None  # of the last step
        self.part = waits

    def start(self, part: str) -> None:
        """Begin the first lap. This is also the end of the step before."""
        Stopwatch.running, self.part = self, part
        self.laps = []
        self.lap(part)
        if self.before is not None:
            self.before.next_begin = self.laps[0][1]

    def lap(self, part: str) -> None:
        """End a lap: the time since the last lap is charged to `part`."""
        if self.events:
            event = new_event(self.device, timed=True)
            event.record()
            self.laps.append((part, event))
        else:
            self.laps.append((part, time.perf_counter()))

    def pause(self) -> None:
        """This rank begins to wait for others."""
        self.lap(self.part)

    def go_on(self) -> None:
        """This rank has waited for others."""
        self.lap(self.waits)

    def stop(self) -> Laps:
        """End the step's laps, without waiting for the device."""
        Stopwatch.running = None
        self.before, self.laps = Laps(self.laps, events=self.events), []
        return self.before


_thread = threading.local()


def beside() -> None:
    """From now on this thread works beside the steps of this process: its waiting is none of theirs."""
    _thread.is_beside = True


@contextmanager
def waiting() -> Iterator[None]:
    """A block in which this rank waits for others: for a message, or for a collective that nothing hides.

    Outside of a step, inside another such block, and in a thread that is `beside` the step, it does nothing. A profile
    has a range of the same length.
    """
    watch = None if getattr(_thread, "is_beside", False) else Stopwatch.running
    if watch is None or watch.part == watch.waits:
        yield
        return
    part = watch.part
    watch.pause()
    with named(WAITING):  # may wait for the GIL when it has begun and ended: the laps lie before both
        watch.part = watch.waits
        try:
            yield
        finally:
            watch.part = part
            watch.go_on()
