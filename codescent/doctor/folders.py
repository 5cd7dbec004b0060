"""In: the path of a folder that a run will use. Out: where it is on this host, its room; files of a nonce in it.
Does not leave anything behind: `remove` takes the file away."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from codescent.base import writing
from codescent.base.published import in_words
from codescent.base.reading import read_bytes

SEEN_S = 3.0
"""A network file system may show a new file of another host so late."""
AGAIN_S = 0.1
MOST_BYTES = 1 << 16


def look(path: str, name: str, text: str, ready: str = "") -> dict[str, Any]:
    """What this host has at a path, or at the nearest folder above it that exists; there it writes a small file.

    Args:
        path: of the folder.
        name: of the file.
        text: of the file.
        ready: where the run's data is, if it is prepared. A host that has it writes nothing, nor would a run.

    Returns "path", "exists": the folder that exists, "free_bytes", "all_bytes", "written": the file; "error": why none
    was written.
    """
    wanted = Path(path).absolute()
    above = [wanted, *wanted.parents]
    exists = next(one for one in above if _is_folder(one))
    found: dict[str, Any] = {"path": str(wanted), "exists": str(exists), "written": "", "error": ""}
    found |= {"free_bytes": None, "all_bytes": None}
    if ready and _is_folder(Path(ready)):
        return found
    if exists != wanted and os.path.lexists(wrong := above[above.index(exists) - 1]):
        found["error"] = f"{wrong} is no folder"
        return found
    try:
        room = os.statvfs(exists)
        found |= {"free_bytes": room.f_bavail * room.f_frsize, "all_bytes": room.f_blocks * room.f_frsize}
        file = exists / name
        with writing.open_new(file, within=exists) as made:
            found["written"] = str(file)
            writing.write_all(made, text.encode("ascii"))
            os.fsync(made.fileno())
    except OSError as error:
        found["error"] = in_words(error)
    return found


def seen(folder: str, texts: Mapping[str, str]) -> list[str]:
    """The names of the files of other hosts that are there with their texts."""
    end_s = time.monotonic() + SEEN_S
    while True:
        found = [name for name, text in texts.items() if _text(Path(folder) / name) == text]
        if len(found) == len(texts) or time.monotonic() > end_s:
            return found
        time.sleep(AGAIN_S)


def remove(file: str) -> bool:
    """Remove a file that `look` has written. Returns whether it has gone."""
    if file:
        writing.remove_file(Path(file), missing_ok=True)
    return True


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # a folder above may not be entered
        return False


def _text(file: Path) -> str:
    try:
        return read_bytes(file, MOST_BYTES).decode("ascii")
    except (OSError, UnicodeDecodeError):
        return ""
