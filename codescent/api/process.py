"""In: a block that does a command in a process with a life of its own. Out: the process is as it was before the block.
Does not undo what a command writes, and keeps what Python has imported."""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from codescent.base import cause, early
from codescent.base.errors import UserError
from codescent.base.messages import LEVEL, LEVELS, LOGGER
from codescent.base.stopping import SAVING, STOPPING
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
        if LOGGER.level in LEVELS.values():  # ranks that are processes of their own log from the same level on
            os.environ[LEVEL] = logging.getLevelName(LOGGER.level)
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
    import torch

    from codescent.base.device import kept

    stack.enter_context(warnings.catch_warnings())
    stack.enter_context(kept())
    matmul = torch.backends.cuda.matmul
    for name in ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction"):
        stack.callback(setattr, matmul, name, getattr(matmul, name))
    stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
    stack.callback(torch.set_num_threads, torch.get_num_threads())
    stack.callback(_set_deterministic, torch.are_deterministic_algorithms_enabled())


def _set_deterministic(wanted: bool) -> None:
    from codescent.train.machine import set_deterministic

    set_deterministic(wanted)
