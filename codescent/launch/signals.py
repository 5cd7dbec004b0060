"""In: numbers of signals. Out: the signals that this process receives, in order, instead of their usual effect.
Does not decide what a signal does (local.py does)."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import types
from collections.abc import Sequence
from typing import Any, Self

from codescent.base.early import handles_signals


class SignalQueue:
    """Queues the signals `numbers` inside a `with` block. Restores the old handlers at its end.

    Outside of the main thread no signal comes: `wait` ends when its time is over.
    """

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers = numbers if handles_signals() else ()

    def __enter__(self) -> Self:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)
        if self._numbers:
            self._wakeup_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._before: dict[int, Any] = {number: signal.signal(number, _queued) for number in self._numbers}
        return self

    def wait(self, timeout_s: float) -> list[int]:
        """Signals since the last call, in order. Waits up to `timeout_s` for a signal."""
        ready, _, _ = select.select([self._reader], [], [], max(0.0, timeout_s))
        return [number for number in os.read(self._reader, 4096) if number in self._numbers] if ready else []

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            with contextlib.suppress(TypeError):  # a handler that was not set from Python cannot be restored
                signal.signal(number, handler)
        if self._numbers:
            signal.set_wakeup_fd(self._wakeup_before)
        os.close(self._reader)
        os.close(self._writer)


def _queued(number: int, frame: types.FrameType | None) -> None:
    """Do nothing: the interpreter has already written the number into the pipe."""
