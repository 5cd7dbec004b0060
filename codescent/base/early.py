"""In: signals that come before the run listens to them. Out: which one came; a long preparation that ends.
Does not end the process: a handler here only records the first signal."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from types import FrameType

from codescent.base.stopping import TIME_LIMIT
from codescent.base.time_limit import in_words


class StopAsked(Exception):
    """The process was asked to stop before its run began. There is nothing to save, and nothing is half written.

    `why`: the signal's name, or the time limit.
    """

    def __init__(self, why: str) -> None:
        super().__init__(f"{why}: stopped before the run began; what is prepared of the data stays")
        self.why = why


_first: int | None = None  # signals belong to a process
_patience_s = 0.0  # from the first signal on, in which it ends nothing
_first_s = 0.0
_end_s = math.inf
_may_end = False


def listen(numbers: Collection[int], end_s: float = math.inf) -> None:
    """From now on these signals do nothing but being recorded, and blocked ones arrive.

    `end_s`: seconds since 1970 at which a preparation ends, as by a signal.
    """
    global _end_s
    _end_s = end_s
    if not handles_signals():
        return
    for number in numbers:
        signal.signal(number, _record)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)


def be_patient(numbers: Collection[int], seconds: float) -> None:
    """From now on these signals are recorded, and end nothing for so many seconds: a run that was interrupted goes on
    soon, and saves what is in memory alone."""
    global _patience_s
    if handles_signals():
        _patience_s = seconds
        ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else set()  # nohup
        listen([*{*numbers} - ignored], _end_s)


def hand_over(number: int) -> None:
    """A signal has come to a run of this process that is over: it counts for the next one."""
    _record(number, None)


def handles_signals() -> bool:
    """Whether this thread may say what a signal does: the main thread alone. A run in another thread gets none."""
    return threading.current_thread() is threading.main_thread()


def forget() -> None:
    """The run of this process is over: no signal has come to the next one, and it has no time limit yet."""
    global _first, _end_s, _patience_s
    _first, _end_s, _patience_s = None, math.inf, 0.0


def defer_end() -> None:
    """From now on SIGTERM waits until `may_be_ended`.

    A launcher ends all ranks when one has refused the config. This one shall refuse it, too, not seem to have stopped.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])


def may_be_ended() -> None:
    """This rank has read its config: a SIGTERM that has waited ends it."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])


def first_signal() -> int | None:
    """The first signal that was recorded; None: none was."""
    return _first


def ending_signal() -> int | None:
    """The first signal that was recorded, if it ends what has not begun. None: none was, or it has to wait."""
    return _first if time.monotonic() >= _first_s + _patience_s else None


def hand_on(numbers: Collection[int]) -> None:
    """Before this process is replaced by exec: these signals wait for the next program, and so does a recorded one."""
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    if _first is not None:
        os.kill(os.getpid(), _first)


@contextmanager
def may_end() -> Iterator[None]:
    """A block in which `raise_if_asked` may raise: no rank waits for this one, or each is told of it."""
    global _may_end
    before, _may_end = _may_end, True
    try:
        yield
    finally:
        _may_end = before


def raise_if_asked() -> None:
    """Raise StopAsked after a signal, or when the time is over, inside of `may_end`. Long work calls it often, where it
    may be interrupted."""
    if _may_end:
        raise_if_signalled()
        if time.time() >= _end_s:
            raise StopAsked(f"{TIME_LIMIT}{in_words(os.environ)}")


def raise_if_signalled() -> None:
    """Raise StopAsked after a signal. The time limit does not count: what is ready takes a step before it stops."""
    if (number := ending_signal()) is not None:
        raise StopAsked(signal.Signals(number).name)


def _record(number: int, frame: FrameType | None) -> None:
    global _first, _first_s
    if _first is None:
        _first, _first_s = number, time.monotonic()
