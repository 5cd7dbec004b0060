"""In: a path, the bytes it needs. Out: a hidden folder that takes this path when complete, and is deleted otherwise.
Does not lock and does not continue what was killed: `data/prepared.py` does."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from codescent.base.durable import sync_folder
from codescent.base.errors import UserError

NO_SPACE = "no space left on the disk"


@contextmanager
def published(
    path: Path, needs_bytes: int = 0, taken: str = "is there already; give the name of a new folder"
) -> Iterator[Path]:
    """Write a folder that appears under its name when the block ends, and not at all if the block raises.

    A kill leaves at most the hidden folder that is yielded; the block has to sync the files that it writes there
    (`write_synced`). Parents of `path` are made, an empty folder at `path` is replaced.

    Args:
        needs_bytes: free space without which nothing is begun.
        taken: what to say if another process made `path` in the meantime.

    Raises:
        UserError: what the file system refuses, or `path` is taken; nothing is left behind.
    """
    making = path.absolute().parent / f".{path.name}.{os.urandom(4).hex()}.partial"
    try:
        begin(making, needs_bytes)
        yield making
        try:
            commit(making, path)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):  # what is there is not an empty folder
                raise UserError(f"{path}: {taken}") from error
            raise
    except OSError as error:
        raise UserError(f"{path}: {in_words(error)}: nothing was kept of it") from error
    finally:
        shutil.rmtree(making, ignore_errors=True)


def begin(making: Path, needs_bytes: int = 0) -> None:
    """Make a hidden folder, and its parents, if the disk has `needs_bytes`. Raises OSError, ENOSPC if it has not."""
    making.parent.mkdir(parents=True, exist_ok=True)
    if (free_bytes := shutil.disk_usage(making.parent).free) < needs_bytes:
        said = f"it needs {needs_bytes:,} bytes, {free_bytes:,} are free"
        raise OSError(errno.ENOSPC, said, str(making.parent))
    making.mkdir()


def commit(making: Path, path: Path) -> None:
    """Rename a hidden folder whose files are synced to its name: it survives a power cut from here on."""
    sync_folder(making)
    making.rename(path)
    sync_folder(path.absolute().parent)


def is_full(error: OSError) -> bool:
    """Whether the disk, or the user's share of it, is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def in_words(error: OSError) -> str:
    """What the file system refused, in the user's words."""
    said = error.strerror or str(error)
    if not is_full(error):
        return said
    return NO_SPACE if said == os.strerror(error.errno or 0) else f"{NO_SPACE}: {said}"
