"""In: signals, the time limit of the job. Out: a request to stop, which all ranks receive, and the exit code for it.
Does not save or exit: the loop does, after the step in which all ranks have received the request."""

from __future__ import annotations

import math
import os
import signal
import socket
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from types import FrameType
from typing import Any

from codescent.base.agreement import together
from codescent.base.early import first_signal, hand_over, handles_signals
from codescent.base.errors import UserError
from codescent.base.output import new_line
from codescent.base.stopping import LATER, SAVING, STOPPING, TIME_LIMIT, exit_code_of
from codescent.base.time_limit import in_words
from codescent.train.outcome import GOES_ON, Outcome

SAVES, STOPS = "saves and stops after this step", "stops after this step"
"""What a run does when it is asked to stop."""
CALLED = "other ranks"
"""Why a run stops at a step to go on at once, with other ranks: the launcher has called them together."""
_called: Callable[[], bool] | None = None  # of this process: whether its launcher has called other ranks
AGAIN_S = 0.5
"""Seconds in which a repeated SIGINT is ignored: one Ctrl-C may arrive from both the terminal and a launcher."""


def stop_when_called(called: Callable[[], bool] | None) -> None:
    """From now on a run of this process stops at a step if this is true; None: nobody calls it."""
    global _called
    _called = called


class StopRequest:
    """Records the first of these signals as a request to stop. A second Ctrl-C raises KeyboardInterrupt.

    Schedulers repeat SIGTERM, so only SIGINT interrupts, and only a single rank (`alone`): the launcher stops several.

    Args:
        alone: this is the only rank.
        does: what follows, for the message.
        end_s: seconds since 1970 from which on the run is asked to stop; infinite: it has no limit.
        spares: signals that a script handles itself.
    """

    def __init__(
        self, *, alone: bool, does: str = SAVES, end_s: float = math.inf, spares: Collection[int] = ()
    ) -> None:
        self.alone, self.does, self.end_s = alone, does, end_s
        self.signal: int | None = None
        self.is_over = False  # the time limit has come before any signal
        self.must_meet = False  # this rank has seen that the run ends: all ranks meet, as if it were asked to stop
        self.is_obeyed = False  # this process ends by the request, its own or another rank's
        self.goes_on = False  # this process goes on at once, with other ranks
        self.asked: list[dict[str, Any] | None] = []  # what each rank had received, when `is_final` was asked last
        self._first = 0.0
        self._spares, self._process = spares, os.getpid()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        for number in {*STOPPING, *SAVING}.difference(self._spares) if handles_signals() else ():
            # Respect nohup, which ignores SIGHUP. A shell's `&` ignores SIGINT, too, but a stop must be possible.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._handle)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._before)
        if (early := first_signal()) is not None and self.signal is None:
            self._handle(early, None)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            if not self.is_obeyed or self.goes_on:
                if handler is not None:  # that of native code from before Python, which cannot put it back
                    signal.signal(number, handler)
            elif number != signal.SIGINT:  # a repeated signal changes nothing, also while the interpreter ends
                signal.signal(number, signal.SIG_IGN)
        if self.goes_on and self.signal is not None:  # the run that goes on is asked to stop, too
            hand_over(self.signal)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # of a process that was forked, such as a worker of multiprocessing.Pool
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif self.signal is None:
            self.signal, self._first = number, time.monotonic()
            if self.alone:  # for several ranks the launcher prints it
                self._say(signal.Signals(number).name)
        elif self.alone and number == signal.SIGINT and time.monotonic() - self._first > AGAIN_S:
            raise KeyboardInterrupt

    def _say(self, why: str) -> None:
        """Print what comes, with os.write: `print` is not reentrant. On a terminal a bar or ^C may be in the line."""
        with suppress(OSError):
            os.write(2, f"{new_line()}codescent: {why}: {self.does}\n".encode())

    def is_requested(self) -> bool:
        """Whether this rank has received a signal to stop, its job's time is nearly over, or the ranks must meet."""
        if self.signal is None and not self.is_over and time.time() >= self.end_s:
            self.is_over = True
            if self.alone:
                self._say(f"{TIME_LIMIT}{in_words(os.environ)}")
        return self.is_over or self.signal is not None or self.must_meet or (_called is not None and _called())

    def obeyed(self, outcome: Outcome) -> Outcome:
        """The run has stopped, with this outcome."""
        self.is_obeyed, self.goes_on = True, outcome.exit_code == GOES_ON
        return outcome

    def is_final(self) -> bool:
        """Whether a rank ends by its request. Otherwise the launcher has called other ranks. Collective."""
        self.asked = together(UserError, self.received)
        asked = [one for one in self.asked if one is not None]
        return not asked or any(one["signal"] != CALLED for one in asked)

    def received(self) -> dict[str, Any] | None:
        """What stopped this process, the exit code for it, process id and host; None: nothing has."""
        if self.is_over:
            name, code = TIME_LIMIT, LATER
        elif self.signal is not None:
            name, code = signal.Signals(self.signal).name, exit_code_of(self.signal)
        elif _called is not None and _called():
            name, code = CALLED, GOES_ON
        else:
            return None
        return {"signal": name, "exit_code": code, "process": os.getpid(), "host": socket.gethostname()}
