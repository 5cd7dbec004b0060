"""In: files, and the sha256 expected for each. Out: each file's true sha256, from a cache if the file is unchanged.
Does not reject a wrong hash: callers compare. A cached hash that is not the expected one is computed again."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from codescent.base.cache import cache_folder
from codescent.base.cores import available_cores
from codescent.base.errors import UserError
from codescent.base.output import warn
from codescent.base.reading import open_unbuffered
from codescent.base.sealed import digest, read_sealed, write_sealed
from codescent.base.writing import make_parents
from codescent.data.progress import stage

NOTES = "verified"
BLOCK_BYTES = 1 << 20
LONG_BYTES = 1 << 29
"""Reading at least this many bytes shows a progress bar."""
SETTLED_NS = 2_000_000_000
"""Only files with an older ctime are cached. A change in the same tick of the file system's clock keeps the ctime."""

_from_notes: dict[Path, int] = {}
"""Bytes of each file whose hash this process knows from a note alone."""
_ignores_notes = False

Stamp = tuple[int, ...]
Advance = Callable[[int], None]


class _Read(NamedTuple):
    sha256: str
    stamp: Stamp
    settled: bool


def relied_on() -> dict[Path, int]:
    """The files whose hash this process knows from a note alone, with their bytes: their size and times are those of an
    earlier reading."""
    return dict(_from_notes)


@contextmanager
def without_notes() -> Iterator[None]:
    """Read the files of `relied_on` that are opened in the block. What this process has read is not read twice."""
    global _ignores_notes  # as a cache: one for each process
    _ignores_notes = True
    try:
        yield
    finally:
        _ignores_notes = False


def stamp_of(status: os.stat_result) -> Stamp:
    """Size, mtime, ctime and inode, which change with a file's content. A program can set mtime back, but not ctime."""
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def hash_of(descriptor: int, advance: Advance = lambda _: None) -> str:
    """sha256 of an open file; `advance` is called with the size of each piece."""
    found, buffer, offset = hashlib.sha256(), memoryview(bytearray(BLOCK_BYTES)), 0
    while count := os.preadv(descriptor, [buffer], offset):
        found.update(buffer[:count])
        offset += count
        advance(count)
    return found.hexdigest()


def hashes(
    folder: Path, files: Mapping[str, str | None], *, again: bool = False
) -> tuple[dict[str, str], dict[str, str]]:
    """sha256 of each file of a folder. Returns two dicts by file name: hashes, and a message per unreadable file.

    Files are read on all cores, and the hashes are stored in the user's cache folder. A cached hash is used only if the
    file's stamp has not changed and the hash is the expected one.

    Args:
        files: the expected sha256 by file name; None: unknown.
        again: read every file and ignore the cache.
    """
    place, known = _read_cache(folder)
    found: dict[str, str] = {
        name: entry["sha256"]
        for name, expected in files.items()
        if not again
        and not (_ignores_notes and folder / name in _from_notes)
        and (entry := known.get(name))
        and expected in (None, entry["sha256"])
        and entry["stamp"] == _stamp(folder / name)
    }
    _from_notes.update({folder / name: known[name]["stamp"][0] for name in found})
    paths = [folder / name for name in files if name not in found]
    size_bytes = sum((_stamp(path) or [0])[0] for path in paths)
    problems: dict[str, str] = {}
    settled: dict[str, Any] = {}
    for path, outcome in zip(paths, _read_all(paths, f"verifying {folder.name}", size_bytes), strict=True):
        if isinstance(outcome, str):
            problems[path.name] = outcome
            continue
        found[path.name] = outcome.sha256
        _from_notes.pop(path, None)
        if outcome.settled:
            settled[path.name] = {"sha256": outcome.sha256, "stamp": outcome.stamp}
    if settled:
        _write_cache(place, folder, {**known, **settled}, size_bytes)
    return found, problems


def _read_all(paths: list[Path], title: str, size_bytes: int) -> list[_Read | str]:
    """Apply `_read` to every file, several at a time."""
    stopped = threading.Event()
    pool = ThreadPoolExecutor(available_cores())
    try:
        with stage(title, size_bytes, size_bytes >= LONG_BYTES, may_end=False) as advance:

            def advance_or_stop(count: int) -> None:
                if stopped.is_set():
                    raise InterruptedError("stopped")
                advance(count)

            return list(pool.map(partial(_read, advance=advance_or_stop), paths))
    finally:
        stopped.set()  # also on Ctrl-C: do not wait for files that are being read
        pool.shutdown(cancel_futures=True)


def _read(path: Path, advance: Advance) -> _Read | str:
    """A file's sha256 and stamp, or a message why it cannot be read."""
    began_ns = time.time_ns()
    try:
        with open_unbuffered(path) as stream:
            before = os.fstat(stream.fileno())
            sha256 = hash_of(stream.fileno(), advance)
            after = os.fstat(stream.fileno())
    except OSError as error:
        return f"{path}: cannot be read: {error.strerror}"
    if stamp_of(before) != stamp_of(after):
        return f"{path}: changed while it was being read"
    return _Read(sha256, stamp_of(before), began_ns - before.st_ctime_ns > SETTLED_NS)


def _stamp(path: Path) -> list[int] | None:
    """The file's stamp as a list, as in the cache; None: there is no such file."""
    try:
        return list(stamp_of(path.stat()))
    except OSError:
        return None


def _read_cache(folder: Path) -> tuple[Path | None, dict[str, Any]]:
    """The cache file of a folder, and its entries by file name. Path None: the user has no cache folder."""
    try:
        place = cache_folder() / NOTES / f"{digest(os.path.realpath(folder))}.json"
    except UserError:  # the user's home folder is unknown
        return None, {}
    return place, (read_sealed(place) or {}).get("files", {})


def _write_cache(place: Path | None, folder: Path, files: Mapping[str, Any], size_bytes: int) -> None:
    """Write the cache file of a folder. If that fails after a long reading (LONG_BYTES), warn."""
    try:
        if place is None:
            raise OSError(0, "there is no home folder")
        make_parents(place.parent)
        write_sealed(place, {"folder": str(folder), "files": files})
    except OSError as error:
        if size_bytes >= LONG_BYTES:
            warn(f"{place}: cannot be written ({error.strerror}): {folder} is read again by every process")
