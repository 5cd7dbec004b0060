"""In: a path of a text file, and lines. Out: lines appended atomically, read forwards or backwards, cut off.
Does not parse lines, does not load a whole file, and skips an incomplete last line that a kill has left."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import IO

from codescent.base import writing
from codescent.base.errors import UserError
from codescent.base.published import in_words, is_full
from codescent.base.reading import open_regular

BLOCK_BYTES = 1 << 16
MOST_BYTES, MOST_LINE_BYTES = 1 << 36, 1 << 24
"""A larger file, or a longer line, is none that a run has written."""


@contextmanager
def user_errors(path: Path) -> Iterator[None]:
    """Convert an OSError in the block to a UserError that names the path."""
    try:
        yield
    except OSError as error:
        where = error.filename or path
        advice = ": free some space, then resume the run" if is_full(error) else ""
        raise UserError(f"{where}: {in_words(error)}{advice}") from error


def append(path: Path, line: str, header: str = "") -> None:
    """Append a line in one write. First an incomplete last line is removed. A failed write leaves no part.

    Args:
        header: text to write first if the file is new or empty.

    Raises:
        UserError: the disk is full, or the file is not writable.
    """
    with user_errors(path), writing.open_own(path, appends=True, makes=True) as file:
        size, whole = file.tell(), _whole_bytes(file, path)
        if whole != size:
            file.truncate(whole)
        data = (line if whole or not header else header + line).encode()
        try:
            if file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        except OSError:
            file.truncate(whole)
            raise


def forward(path: Path) -> Iterator[bytes]:
    """All complete lines from first to last, without newlines. A missing file has no lines.

    Raises UserError: it cannot be read, such as a link that leads nowhere.
    """
    with _reading(path) as file:
        while line := file.readline(MOST_LINE_BYTES + 1):
            if len(line) > MOST_LINE_BYTES:
                raise _too_long(path)
            if line.endswith(b"\n"):
                yield line[:-1]


def backward(path: Path) -> Iterator[tuple[int, bytes]]:
    """All complete lines from last to first, without newlines, each with the offset of its first byte."""
    with _reading(path) as file:
        # `data` begins at byte `begin` of the file; the lines after data[:end] are done.
        begin, data, end = _whole_bytes(file, path), b"", 0
        while begin + end:
            newline = data.rfind(b"\n", 0, max(0, end - 1))
            if newline < 0 and end > MOST_LINE_BYTES:
                raise _too_long(path)
            if newline < 0 and begin:
                before = max(0, begin - BLOCK_BYTES)
                data, end, begin = _read(file, before, begin) + data[:end], begin - before + end, before
            else:
                yield begin + newline + 1, data[newline + 1 : end - 1]
                end = newline + 1


def count(path: Path) -> int:
    """Number of complete lines."""
    with _reading(path) as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(4 * BLOCK_BYTES), b""))


def ends_within_a_line(path: Path) -> bool:
    """Whether the last line has no newline. Such a line is left out."""
    with _reading(path) as file:
        size_bytes = file.seek(0, os.SEEK_END)
        return bool(size_bytes) and _read(file, size_bytes - 1, size_bytes) != b"\n"


def cut(path: Path, lines: int) -> int:
    """Delete what is after the first `lines` lines. Returns how many of it were complete lines."""
    more = max(0, count(path) - lines)
    _cut_to(path, sum(len(line) + 1 for line in islice(forward(path), lines)))
    return more


def cut_later(path: Path, is_later: Callable[[bytes], bool], *, header: bool = False) -> int:
    """Delete lines from the end until one that is not later, which stays; with `header` also the first one stays.

    Returns their number. What `is_later` raises is raised before a line is deleted.
    """
    deleted = end = 0
    for begin, line in backward(path):
        if (header and begin == 0) or not is_later(line):
            end = begin + len(line) + 1
            break
        deleted += 1
    _cut_to(path, end)
    return deleted


def _cut_to(path: Path, size_bytes: int) -> None:
    with user_errors(path):
        if path.is_file() and path.stat().st_size != size_bytes:
            writing.cut(path, size_bytes)


@contextmanager
def _reading(path: Path) -> Iterator[IO[bytes]]:
    if path.is_symlink() and not path.exists():  # to take it for a missing file would lose what it led to
        raise UserError(f"{path}: is a symbolic link that leads nowhere: mend the link")
    with user_errors(path), open_regular(path) if path.exists() else io.BytesIO() as file:
        if (size_bytes := file.seek(0, os.SEEK_END)) > MOST_BYTES:
            raise UserError(f"{path}: has {size_bytes:,} bytes, more than a run writes")
        file.seek(0)
        yield file


def _read(file: IO[bytes] | io.FileIO, begin: int, end: int) -> bytes:
    file.seek(begin)
    return file.read(end - begin)


def _too_long(path: Path) -> UserError:
    return UserError(f"{path}: has a line of more than {MOST_LINE_BYTES:,} bytes, which no run writes")


def _whole_bytes(file: IO[bytes] | io.FileIO, path: Path) -> int:
    """Number of bytes up to the last newline, included. Later bytes are an incomplete line."""
    size = end = file.seek(0, os.SEEK_END)
    while end > 0:
        if size - end > MOST_LINE_BYTES:
            raise _too_long(path)
        begin = max(0, end - BLOCK_BYTES // 16)
        newline = _read(file, begin, end).rfind(b"\n")
        if newline >= 0:
            return begin + newline + 1
        end = begin
    return 0
