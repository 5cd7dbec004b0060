"""In: the path of a new folder, how many bytes it will take. Out: a hidden folder to fill, renamed to the path when
complete. If the disk has fewer bytes free, a UserError says so before anything is written.
Does not lock a folder (data/prepared.py does). Does not continue a half-written folder after a kill
(data/text/prepare.py does)."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from codescent.base import writing
from codescent.base.durable import sync_folder
from codescent.base.errors import UserError

NO_SPACE = "no space left on the disk"


@contextmanager
def published(
    path: Path, needs_bytes: int = 0, taken: str = "is there already; give the name of a new folder"
) -> Iterator[Path]:
    """Create a folder atomically: yield a hidden folder, and rename it to `path` when the block ends.

    If the block raises, the hidden folder is deleted. A kill can leave the hidden folder, but never an incomplete
    `path`. The block must write its files with `write_synced`. Missing parents of `path` are created, and an empty
    folder at `path` is replaced.

    Args:
        needs_bytes: free disk space required at the start.
        taken: end of the message if another process has created `path` meanwhile.

    Raises:
        UserError: the file system reported an error, or `path` exists. The hidden folder is deleted.
    """
    making = path.absolute().parent / f".{path.name}.{os.urandom(4).hex()}.partial"
    try:
        begin(making, needs_bytes)
        yield making
        try:
            commit(making, path)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):  # a file, or a folder with files
                raise UserError(f"{path}: {taken}") from error
            raise
    except OSError as error:
        raise UserError(f"{path}: {in_words(error)}: nothing was saved") from error
    finally:
        writing.remove_folder(making, ignore_errors=True)


def begin(making: Path, needs_bytes: int = 0, within: Path | None = None) -> None:
    """Create a hidden folder and its parents; `within`: see writing.py.

    Raises OSError: fewer than `needs_bytes` are free (ENOSPC), or a link is below `within`.
    """
    writing.make_parents(making.parent)
    if (free_bytes := shutil.disk_usage(making.parent).free) < needs_bytes:
        said = f"it needs {needs_bytes:,} bytes, {free_bytes:,} are free"
        raise OSError(errno.ENOSPC, said, str(making.parent))
    writing.make_folder(making, within, exist_ok=False)


def commit(making: Path, path: Path, within: Path | None = None) -> None:
    """Rename a hidden folder to `path` durably; `within`: see writing.py. Its files must be synced already."""
    sync_folder(making)
    writing.move(making, path, within)
    sync_folder(path.absolute().parent)


def is_full(error: OSError) -> bool:
    """Whether the error means a full disk or an exhausted disk quota."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def in_words(error: OSError) -> str:
    """The error of the file system as text for the user."""
    said = error.strerror or str(error)
    if not is_full(error):
        return said
    return NO_SPACE if said == os.strerror(error.errno or 0) else f"{NO_SPACE}: {said}"
