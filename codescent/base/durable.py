"""In: a path and its content. Out: a file with the old content or the new, whole, that survives a kill or a power cut.
Does not publish folders (published does) and leaves the file system's errors to the caller."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Content = str | bytes | Iterable[bytes]
"""Of a file; what is iterated is never in memory as a whole."""


def write_synced(path: Path, content: Content) -> None:
    """Write a new file and wait until it is on the disk. Its name is, once the folder is synced."""
    text = content.encode() if isinstance(content, str) else content
    with path.open("wb") as file:
        file.writelines([text] if isinstance(text, bytes) else text)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, content: Content) -> None:
    """The old content or the new, never a part: written beside as `.NAME.partial`, synced, renamed over."""
    making = path.with_name(f".{path.name}.partial")
    try:
        write_synced(making, content)
        making.replace(path)
    except BaseException:
        making.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file: a reader sees the old one or the new one, whole."""
    replace_file(path, json.dumps(value, indent=1) + "\n")


def sync_folder(path: Path) -> None:
    """Make the names in a folder (creations, renames, deletions) survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
