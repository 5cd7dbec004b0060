"""In: the parts of a step as they end, and the blocks in which this rank waits for other ranks. Out: seconds of each.
Does not know which parts a step has (train/execute.py does)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

from codescent.base.range_names import WAITING
from codescent.base.ranges import named


class Stopwatch:
    """Measures the seconds between laps. On CUDA it records events, so that the host does not wait for the device.

    A part is the name to which time is charged. Time inside `waiting` is charged to `waits`, whatever part is running.

    Attributes:
        part: the running part.
        running: the stopwatch of the step that this process takes now; None: it takes none.
    """

    running: ClassVar[Stopwatch | None] = None

    def __init__(self, device: torch.device, waits: str) -> None:
        self.cuda, self.waits = device.type == "cuda", waits
        self.laps: list[tuple[str, Any]] = []
        self.part = waits

    def start(self, part: str) -> None:
        """Begin the first lap."""
        Stopwatch.running, self.part = self, part
        self.laps.clear()
        self.lap(part)

    def lap(self, part: str) -> None:
        """End a lap: the time since the last lap is charged to `part`."""
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
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

    def read(self) -> dict[str, float]:
        """Return the seconds of each part between the first lap and the last, and stop the stopwatch."""
        Stopwatch.running = None
        if self.cuda:
            torch.cuda.synchronize()
        seconds: dict[str, float] = {}
        for (_, begin), (part, end) in zip(self.laps, self.laps[1:]):
            elapsed = begin.elapsed_time(end) / 1e3 if self.cuda else end - begin
            seconds[part] = seconds.get(part, 0.0) + elapsed
        self.laps.clear()
        return seconds


@contextmanager
def waiting() -> Iterator[None]:
    """A block in which this rank waits for others: for a message, or for a collective that nothing hides.

    Outside of a step, and inside another such block, it does nothing. A profile has a range of the same length.
    """
    watch = Stopwatch.running
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
