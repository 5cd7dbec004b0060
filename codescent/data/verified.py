"""In: files, and the sha256 expected for each. Out: each file's true sha256, from a cache if the file is unchanged.
Does not reject a wrong hash: callers compare. A cached hash that is not the expected one is computed again."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from codescent.base.cache import cache_folder
from codescent.base.cores import available_cores
from codescent.base.durable import replace_file
from codescent.base.errors import UserError
from codescent.base.output import warn
from codescent.base.reading import open_unbuffered, read_bytes
from codescent.base.sealed import digest, read_sealed, write_sealed
from codescent.base.writing import make_parents
from codescent.data.progress import stage
from codescent.data.sums import Sums, of_blocks

NOTES = "verified"
READ_BYTES = 1 << 20
MOST_SUMS_BYTES = 1 << 31
"""Checksums of 2 TiB."""
LONG_BYTES = 1 << 29
"""Reading at least this many bytes shows a progress bar."""
SETTLED_NS = 2_000_000_000
"""Only files with an older ctime are cached. A change in the same tick of the file system's clock keeps the ctime."""

Stamp = tuple[int, ...]
Advance = Callable[[int], None]

_from_notes: dict[Path, int] = {}
"""Bytes of each file whose hash this process knows from a note alone."""
_own: dict[Path, Stamp] = {}
"""The stamp of each file that this process has hashed itself, and so need not hash again after the loss of a rank."""
_ignored: frozenset[Path] = frozenset()
"""Files whose notes do not count now."""
_sums: dict[Path, tuple[str, Sums]] = {}
"""The sha256 and the checksums of each file that this process has hashed, or asked for."""
_compares_reads = True


class _Read(NamedTuple):
    sha256: str
    stamp: Stamp
    settled: bool
    sums: Sums


def relied_on() -> dict[Path, int]:
    """The files whose hash this process knows from a note alone, with their bytes: their size and times are those of an
    earlier reading."""
    return dict(_from_notes)


def unsummed() -> dict[Path, int]:
    """Those of `relied_on` whose blocks nobody knows: their checksums are not beside the note, or are damaged there."""
    return {path: size_bytes for path, size_bytes in relied_on().items() if _noted_sums(path) is None}


def unnoticed(size_bytes: int) -> str:
    """What a user should know where so many bytes of `unsummed` are not read again."""
    return (
        f"data: {size_bytes / 1e9:,.1f} GB are not read again, as size and times of the files are those of an earlier "
        "reading: a bit that turned on the disk is not noticed"
    )


@contextmanager
def without_notes(files: Collection[Path]) -> Iterator[None]:
    """Read those of the files that are opened in the block, unless this process has read them: notes do not count."""
    global _ignored  # as a cache: one for each process
    _ignored = frozenset(files)
    try:
        yield
    finally:
        _ignored = frozenset()


def compare_reads(wanted: bool) -> None:
    """From now on what is read of files is compared with `sums_of`, or not."""
    global _compares_reads
    _compares_reads = wanted


def sums_of(path: Path, sha256: str) -> Sums | None:
    """The checksums of a file with this sha256, as this process or an earlier one has computed them; None: unknown."""
    if not _compares_reads:
        return None
    known = _sums.get(path)
    if known is None or known[0] != sha256:
        known = _noted_sums(path)
    return known[1] if known is not None and known[0] == sha256 else None


def _noted_sums(path: Path) -> tuple[str, Sums] | None:
    """The sha256 of a file by its note, and the checksums beside the note; None: they are missing or damaged."""
    place, files = _read_cache(path.parent)
    entry = files.get(path.name, {})
    if place is None or not entry.get("sums"):
        return None
    try:
        data = read_bytes(_place_of_sums(place, path.name), MOST_SUMS_BYTES)
    except OSError:
        return None
    if hashlib.sha256(data).hexdigest() != entry["sums"]:
        return None
    _sums[path] = entry["sha256"], np.frombuffer(data, "<u4")
    return _sums[path]


def stamp_of(status: os.stat_result) -> Stamp:
    """Size, mtime, ctime and inode, which change with a file's content. A program can set mtime back, but not ctime."""
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def hash_of(descriptor: int) -> str:
    """sha256 of an open file."""
    found = hashlib.sha256()
    for piece in _pieces(descriptor):
        found.update(piece)
    return found.hexdigest()


def _pieces(descriptor: int) -> Iterator[memoryview]:
    """An open file in pieces of READ_BYTES; the last one may be shorter. A piece is overwritten by the next one."""
    buffer, offset, filled = memoryview(bytearray(READ_BYTES)), 0, READ_BYTES
    while filled == READ_BYTES:
        filled = 0
        while filled < READ_BYTES and (count := os.preadv(descriptor, [buffer[filled:]], offset + filled)):
            filled += count
        if filled:
            yield buffer[:filled]
        offset += filled


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
        and not (folder / name in _ignored and folder / name in _from_notes)
        and (entry := known.get(name))
        and expected in (None, entry["sha256"])
        and entry["stamp"] == _stamp(folder / name)
    }
    noted = {folder / name: known[name]["stamp"] for name in found}
    _from_notes.update({path: stamp[0] for path, stamp in noted.items() if list(_own.get(path, ())) != stamp})
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
        _own[path] = outcome.stamp
        _sums[path] = outcome.sha256, outcome.sums
        if outcome.settled:
            settled[path.name] = {"sha256": outcome.sha256, "stamp": outcome.stamp, **_kept(place, path.name, outcome)}
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
            found, blocks = hashlib.sha256(), array("I")
            for piece in _pieces(stream.fileno()):
                found.update(piece)
                blocks.extend(of_blocks(piece))
                advance(len(piece))
            after = os.fstat(stream.fileno())
    except OSError as error:
        return f"{path}: cannot be read: {error.strerror}"
    if stamp_of(before) != stamp_of(after):
        return f"{path}: changed while it was being read"
    settled = began_ns - before.st_ctime_ns > SETTLED_NS
    return _Read(found.hexdigest(), stamp_of(before), settled, np.array(blocks, "<u4"))


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


def _place_of_sums(place: Path, name: str) -> Path:
    """Beside the note of a folder, the file with the checksums of one of its files."""
    return place.with_name(f"{place.stem}-{digest(name)[:16]}.crc32")


def _kept(place: Path | None, name: str, outcome: _Read) -> dict[str, str]:
    """Write the checksums of a file beside the note of its folder. Returns what the note says of them; nothing: they
    cannot be written, and later runs do not know them."""
    if place is None:
        return {}
    data = outcome.sums.tobytes()
    try:
        make_parents(place.parent)
        replace_file(_place_of_sums(place, name), data)
    except OSError:
        return {}
    return {"sums": hashlib.sha256(data).hexdigest()}


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
