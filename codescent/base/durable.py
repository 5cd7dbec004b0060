"""In: a path and its content. Out: a file written atomically: after a kill or a power cut it is complete, old or new.
Does not write folders atomically (published.py does) and does not catch OSError."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Content = str | bytes | Iterable[bytes]
"""Content of a file. The parts of an iterable are written one by one."""


def write_synced(path: Path, content: Content, mode: int = 0o666) -> None:
    """Write a new file and wait until its bytes are on the disk. Then call `sync_folder`: it makes the name durable.

    `mode`: who may read it, less what the process's umask takes away.
    """
    text = content.encode() if isinstance(content, str) else content
    with open(path, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
        file.writelines([text] if isinstance(text, bytes) else text)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, content: Content, mode: int = 0o666) -> None:
    """Replace a file atomically: write `.NAME.partial` in the same folder, sync it, rename it to the file's name.

    `mode`: who may read the new file, less what the process's umask takes away.
    """
    making = path.with_name(f".{path.name}.partial")
    try:
        write_synced(making, content, mode)
        making.replace(path)
    except BaseException:
        making.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file atomically."""
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
