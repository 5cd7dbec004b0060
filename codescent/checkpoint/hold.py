"""In: the folder of a checkpoint. Out: a hold on it: as long as somebody has one, its run does not delete it.
Does not read tensors, and does not stop whoever deletes files by hand, or a run on a disk that knows no locks."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

from codescent.checkpoint.manifest import MANIFEST


def hold(folder: Path) -> FileIO | None:
    """A hold on a checkpoint, until the file is closed. None: the folder is gone, or is being deleted.

    It is a shared lock on the manifest: one descriptor, however many files there are, and nothing is written.
    """
    try:
        file = (folder / MANIFEST).open("rb", buffering=0)
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
    """Whether nobody holds a checkpoint; if so, nobody can until the block ends."""
    try:
        descriptor = os.open(folder / MANIFEST, os.O_RDWR)  # NFS locks for one alone only what is open for writing
    except PermissionError:
        descriptor = os.open(folder / MANIFEST, os.O_RDONLY)
    try:
        _lock(descriptor, fcntl.LOCK_EX)
        yield True
    except BlockingIOError:
        yield False
    finally:
        os.close(descriptor)


def _lock(descriptor: int, kind: int) -> None:
    """Raises BlockingIOError: another process has it. A file system without locks holds nothing."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        pass
