"""In: an error that ends this rank, while other ranks may go on. Out: this process has ended: soon, with its message.
Does not know process groups (train/world.py does) and does not end other ranks (their launcher does).

Decision 19: no collective and no teardown on the way out. Each could wait for ranks that wait for this one."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import NoReturn

from codescent.base import cause
from codescent.base.errors import UserError
from codescent.base.output import warn
from codescent.base.progress import OwnPage
from codescent.base.visible import visible

LIMIT_S = 20.0
"""Seconds from the error to the end of the process, whatever the rank still does: close files, call loggers."""
FREE_S = 5.0
"""Seconds for giving up process groups, after the error was printed."""


@dataclass
class _Failure:
    """The error that ends this rank.

    Attributes:
        error: is printed at the limit, unless the rank has printed it.
        said: whether it was printed.
        free: gives up process groups without other ranks.
    """

    error: BaseException
    said: bool = False
    free: Callable[[], None] | None = None


_failure: _Failure | None = None  # a process ends once


@contextmanager
def ends_soon(ranks: int) -> Iterator[None]:
    """A block of one of so many ranks. If an error leaves it, this process ends within LIMIT_S, even if it hangs.

    If another thread has failed before, its error leaves the block instead: it is the cause.
    """
    try:
        yield
    except BaseException as error:
        if ranks > 1:
            fail(error)
        if _failure is not None and _failure.error is not error:
            raise _failure.error from error
        raise


def fail(error: BaseException, free: Callable[[], None] | None = None, *, said: bool = False) -> None:
    """This rank ends by an error that other ranks may not have. A first call starts the time limit of this process.

    From then on SIGTERM changes nothing: the exit code is that of the error.

    Args:
        error: the first one counts.
        free: gives up process groups without other ranks; called at the end.
        said: whether the error is printed already.
    """
    global _failure
    if _failure is None:
        _failure = _Failure(error)
        with suppress(ValueError):  # not the main thread
            # A launcher ends all ranks as soon as one has ended. 143 would say that this one was stopped, and saved.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        threading.Thread(target=_end_at_limit, args=(_failure,), name="codescent end", daemon=True).start()
    if OwnPage.current is not None:
        OwnPage.current.fail(is_consequence=cause.process.is_consequence)
    _failure.said |= said
    _failure.free = free or _failure.free


def is_failing() -> bool:
    """Whether an error ends this rank."""
    return _failure is not None


def end(code: int | None = None) -> None:
    """End this process, if an error ends this rank; otherwise return.

    Neither the interpreter's end nor a destructor runs: both may wait for other ranks. Files of this rank are closed
    by then, and what it printed is flushed here.

    Args:
        code: the exit code; None: that of the interpreter for this error.
    """
    if _failure is not None:
        _failure.said = True
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # full, closed
                stream.flush()
        if _failure.free is not None:
            within(FREE_S, _failure.free)
        if code is None and isinstance(_failure.error, KeyboardInterrupt):  # shells look at the signal
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        os._exit(code_of(_failure.error) if code is None else code)


def end_now(error: BaseException) -> NoReturn:
    """Print an error and end this process at once, whatever its threads do. For a thread that watches the others."""
    if OwnPage.current is not None:
        OwnPage.current.fail(is_consequence=False)
    _write(_words(error))
    os._exit(code_of(error))


def end_by(error: BaseException) -> None:
    """Print an error as the interpreter does, and end this process, if an error ends this rank; otherwise return."""
    cause.write_error_file(error, os.environ)
    if _failure is not None:
        if not isinstance(error, SystemExit):
            if cause.prints(error, os.environ):
                sys.excepthook(type(error), error, error.__traceback__)
                if words := cause.last_words(error, os.environ):
                    warn(*words)
        elif isinstance(error.code, str):
            warn(error.code)
        end(code_of(error))


def code_of(error: BaseException) -> int:
    """The exit code of a process that an error ends."""
    if isinstance(error, UserError):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
        return error.code or 0
    return 1


def within(seconds: float, act: Callable[[], None]) -> bool:
    """Call a function in a thread of its own. Returns whether it has returned within so many seconds.

    An error of the function is printed, not raised: the way out goes on.
    """
    thread = threading.Thread(target=_tried, args=(act,), name="codescent free", daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def _tried(act: Callable[[], None]) -> None:
    try:
        act()
    except Exception as error:
        _write(f"codescent: on the way out: {error!r}\n")


def _end_at_limit(failure: _Failure) -> NoReturn:
    """End this process when its time is over."""
    time.sleep(LIMIT_S)
    with suppress(OSError, ValueError):
        cause.write_error_file(failure.error, os.environ)
        if not failure.said:
            _write(_words(failure.error))
        _write(f"codescent: {LIMIT_S:g} s after its error this rank still runs; it ends now. Where it was:\n")
        faulthandler.dump_traceback(2)
    os._exit(code_of(failure.error))


def _words(error: BaseException) -> str:
    if isinstance(error, UserError):
        return "".join(f"error: {visible(problem)}\n" for problem in error.problems)
    return "".join(traceback.format_exception(error))


def _write(text: str) -> None:
    """Write to descriptor 2: another thread may hold the lock of sys.stderr."""
    os.write(2, text.encode(errors="backslashreplace"))
