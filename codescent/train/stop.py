"""In: SIGINT, SIGTERM and SIGHUP. Out: a request to stop, which all ranks receive, and the exit code for it.
Does not save or exit: the loop does, after the step in which all ranks have received the request."""

from __future__ import annotations

import os
import signal
import socket
import time
from contextlib import suppress
from types import FrameType
from typing import Any

AGAIN_S = 0.5
"""Seconds in which a repeated SIGINT is ignored: one Ctrl-C may arrive from both the terminal and a launcher."""

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The signals of Ctrl-C; of a scheduler or `kill`; of a closed terminal (ignored under nohup)."""


class StopRequest:
    """Records the first of these signals as a request to stop. A second Ctrl-C raises KeyboardInterrupt.

    `saves` says whether a checkpoint is saved at the stop, for the message.
    Schedulers repeat SIGTERM, so only SIGINT interrupts, and only a single rank (`alone`): the launcher stops several.
    """

    def __init__(self, *, alone: bool, saves: bool = True) -> None:
        self.alone, self.does = alone, "saves and stops" if saves else "stops"
        self.signal: int | None = None
        self._first = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        for number in STOPPING:
            # Respect nohup, which ignores SIGHUP. A shell's `&` ignores SIGINT, too, but a stop must be possible.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal, self._first = number, time.monotonic()
            if self.alone:  # for several ranks the launcher prints it; os.write, as `print` is not reentrant
                with suppress(OSError):
                    os.write(2, f"codescent: {signal.Signals(number).name}: {self.does} after this step\n".encode())
        elif self.alone and number == signal.SIGINT and time.monotonic() - self._first > AGAIN_S:
            raise KeyboardInterrupt

    def is_requested(self) -> bool:
        """Whether this rank has received a signal to stop."""
        return self.signal is not None

    def received(self) -> dict[str, Any] | None:
        """The signal that stopped this process, its exit code (128 + signal), process id and host; None: no signal."""
        if self.signal is None:
            return None
        name = signal.Signals(self.signal).name
        return {"signal": name, "exit_code": 128 + self.signal, "process": os.getpid(), "host": socket.gethostname()}
