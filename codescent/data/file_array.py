"""In: a binary file whose sha256 was checked (verified.py). Out: an array whose slices are read from disk on access.
Does not map the file into memory: if a mapped file is truncated, SIGBUS kills the process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from codescent.base.errors import UserError
from codescent.base.reading import open_regular, open_unbuffered
from codescent.data.prepared import DESCRIPTION
from codescent.data.sums import BLOCK_BYTES, Sums, around, first_wrong
from codescent.data.verified import hash_of, stamp_of, sums_of


class FileChanged(UserError):
    """A file of data has no longer the content that was verified. The sentence says how the user gets it back."""


class Watched:
    """An open file whose content must not change. If its stamp (`stamp_of`) changes, the file is hashed again.

    Args:
        sha256: the expected hash of the content; "": unknown, so every change of the stamp is an error.
    """

    def __init__(self, path: Path, sha256: str = "") -> None:
        self.path, self._sha256 = path, sha256
        try:
            self._file = open_unbuffered(path)
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}") from error
        self._stamp = stamp_of(os.fstat(self._file.fileno()))
        self._sums: Sums | None = None
        self._knows_sums = False

    def check(self) -> None:
        """Raise FileChanged if the content has changed, UserError if the file cannot be read."""
        try:
            stamp = stamp_of(os.fstat(self._file.fileno()))
            if stamp == self._stamp:
                return
            if stamp[0] < self._stamp[0]:
                raise self._truncated(stamp[0])
            if hash_of(self._file.fileno()) != self._sha256:
                raise self._changed("changed while it was in use")
        except OSError as error:
            raise UserError(f"{self.path}: cannot be read: {error.strerror}") from error
        self._stamp = stamp

    def read_into(self, buffer: memoryview, offset_bytes: int) -> None:
        """Fill `buffer` with the bytes from `offset_bytes` on.

        Raises UserError: the file cannot be read. FileChanged: it is too short, or its bytes do not have the checksums
        that they had when the file was hashed. Where these are not known, nothing is compared.
        """
        if not self._knows_sums:  # at the first reading: by then the run has decided whether it compares
            self._sums, self._knows_sums = sums_of(self.path, self._sha256), True
        if self._sums is None:
            self._fill(buffer, offset_bytes)
            return
        first, end = around(offset_bytes, len(buffer), self._stamp[0])
        if end < offset_bytes + len(buffer):
            raise self._truncated(end)
        whole = memoryview(bytearray(end - first))
        self._fill(whole, first)
        if (wrong := first_wrong(whole, first, self._sums)) is not None:
            raise self._changed(
                f"changed on the disk, although size and times are the same: the {BLOCK_BYTES} bytes from byte {wrong} "
                "on are not those that were verified"
            )
        buffer[:] = whole[offset_bytes - first : offset_bytes - first + len(buffer)]

    def _fill(self, buffer: memoryview, offset_bytes: int) -> None:
        while buffer:
            try:
                count = os.preadv(self._file.fileno(), [buffer], offset_bytes)
            except OSError as error:
                raise UserError(f"{self.path}: cannot be read at byte {offset_bytes}: {error.strerror}") from error
            if not count:
                raise self._truncated(offset_bytes)
            buffer, offset_bytes = buffer[count:], offset_bytes + count

    def _truncated(self, size_bytes: int) -> FileChanged:
        return self._changed(f"truncated while it was in use: ends at byte {size_bytes}, had {self._stamp[0]}")

    def _changed(self, what: str) -> FileChanged:
        folder = self.path.parent
        again = f", or delete {folder} and prepare it again" if (folder / DESCRIPTION).is_file() else ""
        return FileChanged(f"{self.path}: {what}: restore the file{again}")


class FileArray:
    """An array of `length` items that begins at `offset_bytes` of a file.

    An item is a number, a structure, or a subarray (a dtype with a shape). `array[first:stop]` and `array[numbers]`
    read the values that numpy would return. Raises UserError like `Watched`.
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
        """Read `count` consecutive items from each item number in `firsts` [n] on: [n, count]."""
        self._file.check()
        out = np.empty((len(firsts), count), self._item)
        raw, size = out.reshape(-1).view(np.uint8).data, count * self._item.itemsize
        for row, first in enumerate(firsts.tolist()):
            self._file.read_into(raw[row * size : (row + 1) * size], self._offset_bytes + first * self._item.itemsize)
        return out


def open_npy(path: Path, sha256: str) -> FileArray:
    """Open an array that `data.prepared.write_array` wrote. Raises UserError: the file cannot be read."""
    file = Watched(path, sha256)
    with open_regular(path) as stream:
        np.lib.format.read_magic(stream)
        shape, by_columns, dtype = np.lib.format.read_array_header_1_0(stream)
        if by_columns and len(shape) > 1:
            raise UserError(f"{path}: an array whose columns follow each other: it was not written by codescent")
        return FileArray(file, np.dtype((dtype, shape[1:])), stream.tell(), shape[0])
