"""In: a folder of checkpoints. Out: what is in it, by step; one of its folders, deleted.
Does not know which checkpoint is complete. `within`: see base/writing.py."""

from __future__ import annotations

import os
import re
import warnings
from contextlib import suppress
from pathlib import Path

from codescent.base import writing
from codescent.checkpoint.manifest import CheckpointError

_CHECKPOINT = re.compile(r"(?:\.replaced_)?step_(\d{8,18})")


def listed(folder: Path) -> list[Path]:
    """What is in a folder of checkpoints, sorted. Raises CheckpointError: it may not be listed or entered."""
    try:
        found = sorted(folder.iterdir()) if folder.is_dir() else []
        for path in found:
            with suppress(FileNotFoundError):  # another process has deleted it
                path.lstat()
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be listed: {error.strerror}") from error
    return found


def by_step(folder: Path) -> dict[int, Path]:
    """The checkpoint of each step. After a kill between two renames, one has its hidden name. Errors as of `listed`."""
    found = {}
    for path in listed(folder):  # sorted: "step_…" overwrites ".replaced_step_…"
        match = _CHECKPOINT.fullmatch(path.name)
        if match is not None and path.is_dir():
            found[int(match[1])] = path
    return found


def discard(path: Path, within: Path) -> None:
    """Delete a checkpoint. It is renamed first, so a kill never leaves an incomplete folder under a checkpoint name."""
    leaving = path.with_name(f".deleted_{path.name.removeprefix('.replaced_')}_{os.urandom(4).hex()}")
    writing.move(path, leaving, within)
    remove(leaving, within)


def remove(path: Path, within: Path) -> None:
    """Delete a folder. Warns if that fails."""
    try:
        writing.remove_folder(path, within)
    except FileNotFoundError:
        pass  # another process has deleted it
    except OSError as error:  # training continues; the next `clean` tries again
        warnings.warn(f"{path}: not deleted: {error.strerror}", RuntimeWarning, stacklevel=2)
