"""In: a path of a text file, and lines. Out: lines appended atomically, read forwards or backwards, cut off.
Does not parse lines, does not load a whole file, and skips an incomplete last line that a kill has left."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import IO

from codescent.base.errors import UserError
from codescent.base.published import in_words, is_full

BLOCK_BYTES = 1 << 16


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
    with user_errors(path), path.open("ab+", buffering=0) as file:
        size, whole = file.tell(), _whole_bytes(file)
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
    """All complete lines from first to last, without newlines. A missing file has no lines."""
    with _reading(path) as file:
        yield from (line[:-1] for line in file if line.endswith(b"\n"))


def backward(path: Path) -> Iterator[tuple[int, bytes]]:
    """All complete lines from last to first, without newlines, each with the offset of its first byte."""
    with _reading(path) as file:
        # `data` begins at byte `begin` of the file; the lines after data[:end] are done.
        begin, data, end = _whole_bytes(file), b"", 0
        while begin + end:
            newline = data.rfind(b"\n", 0, max(0, end - 1))
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


def cut(path: Path, lines: int) -> int:
    """Delete the complete lines after the first `lines` ones. Returns their number."""
    more = max(0, count(path) - lines)
    if more:
        with user_errors(path):
            os.truncate(path, sum(len(line) + 1 for line in islice(forward(path), lines)))
    return more


@contextmanager
def _reading(path: Path) -> Iterator[IO[bytes]]:
    with user_errors(path), path.open("rb") if path.is_file() else io.BytesIO() as file:
        yield file


def _read(file: IO[bytes], begin: int, end: int) -> bytes:
    file.seek(begin)
    return file.read(end - begin)


def _whole_bytes(file: IO[bytes]) -> int:
    """Number of bytes up to the last newline, included. Later bytes are an incomplete line."""
    end = file.seek(0, os.SEEK_END)
    while end > 0:
        begin = max(0, end - BLOCK_BYTES // 16)
        newline = _read(file, begin, end).rfind(b"\n")
        if newline >= 0:
            return begin + newline + 1
        end = begin
    return 0
