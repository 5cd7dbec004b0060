"""In: the folder of a checkpoint. Out: a hold: a shared file lock; the run does not delete a locked checkpoint.
Does not read tensors. Does not prevent deletion by hand, or on a file system without locks."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

from codescent.base.reading import open_unbuffered
from codescent.checkpoint.manifest import MANIFEST


def hold(folder: Path) -> FileIO | None:
    """Lock a checkpoint until the returned file is closed. None: the folder was deleted, or is being deleted.

    The lock is a shared lock on the manifest. Nothing is written.
    """
    try:
        file = open_unbuffered(folder / MANIFEST)
    except FileNotFoundError:
        return None
    try:
        _lock(file.fileno(), fcntl.LOCK_SH)
        if os.path.samestat(os.fstat(file.fileno()), (folder / MANIFEST).stat()):
            return file
    except (BlockingIOError, FileNotFoundError):
        pass
    file.close()
    return None


@contextmanager
def unheld(folder: Path) -> Iterator[bool]:
    """Lock a checkpoint exclusively during the block. Yields False if a reader holds it."""
    try:
        # on NFS an exclusive lock needs a file that is open for writing
        descriptor = os.open(folder / MANIFEST, os.O_RDWR | os.O_NONBLOCK)
    except PermissionError:
        descriptor = os.open(folder / MANIFEST, os.O_RDONLY | os.O_NONBLOCK)
    try:
        _lock(descriptor, fcntl.LOCK_EX)
        yield True
    except BlockingIOError:
        yield False
    finally:
        os.close(descriptor)


def _lock(descriptor: int, kind: int) -> None:
    """Lock a file. No effect without locks in the file system. Raises BlockingIOError: it is locked already."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        pass
