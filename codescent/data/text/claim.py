"""In: the hidden folder of a dataset that is being made. Out: it is this process's alone; the disk's refusals in words.
Does not know what is made in it: without a journal in it (shards.py writes one), it is not kept."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from codescent.base.durable import sync_folder
from codescent.base.errors import UserError
from codescent.data.text.shards import JOURNAL

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def claimed(partial: Path) -> Iterator[None]:
    """Hold the hidden folder against other processes, or wait for it. Without a journal in it, it is not kept."""
    partial.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with suppress(FileExistsError):  # not exist_ok, which looks again whether it is there: it may have gone
            partial.mkdir()
        try:
            handle = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue  # another process has just let go of it
        _lock(handle, partial)
        if _is_held(partial, handle):
            break
        os.close(handle)  # the one who held it has finished and renamed it
    try:
        yield
    finally:
        if _is_held(partial, handle) and not (partial / JOURNAL).exists():
            shutil.rmtree(partial, ignore_errors=True)
        os.close(handle)


def made_once(find: Callable[[], Path | None], make: Callable[[Path], None], partial: Path, target: Path) -> Path:
    """What `find` finds; else what `make` writes into the hidden folder `partial`, under the name `target`.

    Raises:
        UserError: what the disk refuses, and what the two raise. Nothing half-made is left.
    """
    if found := find():
        return found
    with disk_errors(partial), claimed(partial):
        if found := find():  # made by another process in the meantime
            return found
        make(partial)
        partial.rename(target)
        sync_folder(target.parent)
    return target


def _is_held(partial: Path, handle: int) -> bool:
    try:
        return os.path.samestat(partial.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False


def _lock(handle: int, partial: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(f"another process is preparing this dataset in {partial}: waiting for it", file=sys.stderr, flush=True)
        fcntl.flock(handle, fcntl.LOCK_EX)
    except OSError as error:
        warnings.warn(f"{partial}: this disk has no locks ({error.strerror}): prepare it once at a time", stacklevel=2)


@contextmanager
def disk_errors(partial: Path) -> Iterator[None]:
    """Turn the system's refusals into the user's words."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise UserError(f"{error.filename or partial}: {error.strerror or error}") from error
        kept = (partial / JOURNAL).exists()
        said = "; ".join([error.strerror or "full", *getattr(error, "__notes__", [])])
        raise UserError(
            f"{partial}: no space left on the disk ({said}): "
            + (
                "what was prepared is kept; the same command continues when there is room"
                if kept
                else "nothing was kept"
            )
        ) from error
