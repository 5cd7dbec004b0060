"""In: a block that does a command in a process with a life of its own. Out: the process is as it was before the block.
Does not undo what a command writes, and keeps what Python has imported."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType

from codescent.base import cause, early
from codescent.base.errors import UserError
from codescent.base.messages import LEVEL, nearest_level
from codescent.base.own_names import FOLDERS
from codescent.base.stopping import EXIT_FILE, SAVING, STOPPING
from codescent.launch.spin import with_short_spin

_busy = threading.Lock()


@contextmanager
def as_before(*, computes: bool) -> Iterator[None]:
    """Signals, the environment, and the settings and random numbers of torch are afterwards as they were.

    `computes`: this process trains or samples itself, with torch; else torch is not imported.

    Raises UserError: another thread is in such a block, or a function that this block calls: they share all of this.
    """
    if not _busy.acquire(blocking=False):
        raise UserError(
            "codescent: another call of this process trains or samples now; wait for its end, or use another process"
        )
    with ExitStack() as stack:
        stack.callback(_busy.release)
        stack.callback(_restore_environment, dict(os.environ))
        os.environ.update(with_short_spin(os.environ))  # before torch is imported, and for the ranks
        os.environ.pop(EXIT_FILE, None)  # else the code of a stop would be 0 here: a program is told by an exception
        os.environ[LEVEL] = nearest_level()  # ranks that are processes of their own log from the same level on
        if not computes:  # and find the same modules
            os.environ[FOLDERS] = os.pathsep.join(map(os.path.abspath, filter(None, sys.path)))
        stack.callback(cause.forget)
        stack.callback(early.forget)
        _keep_signals(stack)
        if computes:
            _keep_torch(stack)
        stack.callback(gc.collect)  # frees process groups in reference cycles
        yield


def _restore_environment(before: dict[str, str]) -> None:
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


def _keep_signals(stack: ExitStack) -> None:
    """The handlers and the mask of this thread; only the main thread has handlers."""
    stack.callback(signal.pthread_sigmask, signal.SIG_SETMASK, signal.pthread_sigmask(signal.SIG_BLOCK, ()))
    if early.handles_signals():
        for number in (*STOPPING, *SAVING):
            if (handler := signal.getsignal(number)) is not None:  # of native code, which Python cannot put back
                stack.callback(signal.signal, number, handler)


def _keep_torch(stack: ExitStack) -> None:
    """What a run changes of torch: threads, precision of products, determinism, random numbers, hidden warnings."""
    with _whole_imports():
        import torch

        stack.enter_context(warnings.catch_warnings())  # some modules hide warnings when they are imported
        import codescent.train.loop  # noqa: F401 - what it imports of torch, too

    from codescent.base.device import kept

    stack.enter_context(kept())
    matmul = torch.backends.cuda.matmul
    for name in ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction"):
        stack.callback(setattr, matmul, name, getattr(matmul, name))
    stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
    stack.callback(torch.set_num_threads, torch.get_num_threads())
    stack.callback(_set_deterministic, torch.are_deterministic_algorithms_enabled())


@contextmanager
def _whole_imports() -> Iterator[None]:
    """A block whose imports a first Ctrl-C does not break off. It interrupts afterwards; a second one does not wait.

    Python keeps a part of torch after an interrupted import: no later import in this process would succeed.
    """
    before, asked = signal.getsignal(signal.SIGINT), list[int]()
    if not early.handles_signals() or before is not signal.default_int_handler:
        yield
        return

    def note(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        signal.signal(number, before)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if asked:
        raise KeyboardInterrupt


def _set_deterministic(wanted: bool) -> None:
    from codescent.train.machine import set_deterministic

    set_deterministic(wanted)
