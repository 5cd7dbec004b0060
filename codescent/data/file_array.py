"""In: a file of numbers that was verified. Out: pieces of it, read when they are asked for.
Does not map the file into memory: one that is cut while it is mapped ends the process by SIGBUS."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from codescent.base.errors import UserError
from codescent.data.verified import hash_of, stamp_of

RESTORE = "put it back as it was, and go on with --resume"


class Watched:
    """An open file that may not change. Where its stamp has, it is hashed again.

    Args:
        sha256: what its content must have; "": it may not change at all.
    """

    def __init__(self, path: Path, sha256: str = "") -> None:
        self.path, self._sha256 = path, sha256
        try:
            self._file = path.open("rb", buffering=0)
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}") from error
        self._stamp = stamp_of(os.fstat(self._file.fileno()))

    def check(self) -> None:
        """Raise UserError: the file has changed, or cannot be read any more."""
        try:
            stamp = stamp_of(os.fstat(self._file.fileno()))
            if stamp == self._stamp:
                return
            if stamp[0] < self._stamp[0]:
                raise self._cut(stamp[0])
            if hash_of(self._file.fileno()) != self._sha256:
                raise UserError(f"{self.path}: changed while it was in use: {RESTORE}")
        except OSError as error:
            raise UserError(f"{self.path}: cannot be read: {error.strerror}") from error
        self._stamp = stamp

    def read_into(self, buffer: memoryview, offset_bytes: int) -> None:
        """Fill a buffer of bytes. Raises UserError: the file ends before, or cannot be read."""
        while buffer:
            try:
                count = os.preadv(self._file.fileno(), [buffer], offset_bytes)
            except OSError as error:
                raise UserError(f"{self.path}: cannot be read at byte {offset_bytes}: {error.strerror}") from error
            if not count:
                raise self._cut(offset_bytes)
            buffer, offset_bytes = buffer[count:], offset_bytes + count

    def _cut(self, size_bytes: int) -> UserError:
        return UserError(
            f"{self.path}: cut while it was in use: ends at byte {size_bytes}, had {self._stamp[0]}: {RESTORE}"
        )


class FileArray:
    """The items of an array in a file from `offset_bytes` on: numbers, structures, or arrays of the dtype's own shape.

    `array[first:stop]` and `array[numbers]` are read as numpy would give them. Raises UserError as `Watched`.
    """

    def __init__(self, file: Watched, dtype: npt.DTypeLike, offset_bytes: int, length: int) -> None:
        self._file, self._item, self._offset_bytes = file, np.dtype(dtype), offset_bytes
        self.dtype = self._item.base
        self.shape: tuple[int, ...] = (length, *self._item.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, where: slice | npt.NDArray[np.integer[Any]]) -> npt.NDArray[Any]:
        if not isinstance(where, slice):
            return np.asarray(self.windows(where, 1)[:, 0])
        first, stop, step = where.indices(len(self))
        assert step == 1
        return np.asarray(self.windows(np.array([first]), max(0, stop - first))[0])

    def windows(self, firsts: npt.NDArray[np.integer[Any]], count: int) -> npt.NDArray[Any]:
        """`count` items from each of `firsts` on: [n, count]."""
        self._file.check()
        out = np.empty((len(firsts), count), self._item)
        raw, size = out.reshape(-1).view(np.uint8).data, count * self._item.itemsize
        for row, first in enumerate(firsts.tolist()):
            self._file.read_into(raw[row * size : (row + 1) * size], self._offset_bytes + first * self._item.itemsize)
        return out


def open_npy(path: Path, sha256: str) -> FileArray:
    """The array in a file that `write_array` of `data.prepared` wrote. Raises UserError: it cannot be read."""
    file = Watched(path, sha256)
    with path.open("rb") as stream:
        np.lib.format.read_magic(stream)
        shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
        return FileArray(file, np.dtype((dtype, shape[1:])), stream.tell(), shape[0])
