"""In: a path and its content. Out: a file written atomically: after a kill or a power cut it is complete, old or new.
Does not write folders atomically (published.py does) and does not catch OSError."""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from codescent.base import writing
from codescent.base.reading import open_regular

Content = str | bytes | Iterable[bytes]
"""Content of a file. The parts of an iterable are written one by one."""


def write_synced(path: Path, content: Content, mode: int = 0o666, within: Path | None = None) -> None:
    """Write a new file into a folder that this program has made, and wait until its bytes are on the disk.

    Then call `sync_folder`: it makes the name durable. See `writing.open_new`, also for its errors.
    """
    with writing.open_new(path, mode, within) as file:
        _write(file, content)


def replace_file(path: Path, content: Content, mode: int = 0o666, within: Path | None = None) -> None:
    """Replace a file atomically: write a hidden file of a random name in its folder, sync it, rename it.

    A link at `path` is replaced, not followed. `within`: see writing.py.
    `mode`: who may read the new file, less what the process's umask takes away.

    Raises OSError: the file cannot be written; or `path` is a device, a pipe, or a folder.
    """
    making = path.with_name(f".{os.urandom(8).hex()}.partial")
    within = path.parent if within is None else within
    with writing.place(path, within) as (folder, name):
        writing.refuse_special_at(folder, name, path)
    try:
        write_synced(making, content, mode, within)
        writing.move(making, path, within)
    except BaseException:
        with suppress(OSError):
            writing.remove_file(making, within)
        raise
    sync_folder(path.parent)


def write_json(path: Path, value: Any, within: Path | None = None) -> None:
    """Replace a JSON file atomically."""
    replace_file(path, json.dumps(value, indent=1) + "\n", within=within)


def sync_folder(path: Path) -> None:
    """Make the names in a folder (creations, renames, deletions) survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    with open_regular(path) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _write(file: io.FileIO, content: Content) -> None:
    text = content.encode() if isinstance(content, str) else content
    for part in [text] if isinstance(text, bytes) else text:
        writing.write_all(file, part)
    os.fsync(file.fileno())
