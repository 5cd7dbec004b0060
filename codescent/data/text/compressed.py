"""In: an open file, or the path of one. Out: its content, decompressed (gzip, xz, bzip2, Zstandard).
Does not hold a whole file in memory, except in `read_unpacked`. Does not open archives of files."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from codescent.base.errors import UserError
from codescent.base.extra import library
from codescent.base.reading import read_bytes
from codescent.data.text.forms import COLUMNAR, HEAD_BYTES, binary_form, is_tar, packed_by

READ_BYTES = 1 << 20
MOST_UNPACKED_BYTES = 1 << 32
"""A larger file is not read as a whole."""
_ZSTD_PIECE_BYTES = 1 << 12  # so many bytes unpack to 128 MiB at most: a block of 128 KiB takes 4 bytes or more
_ZSTD_WINDOW_BYTES = 1 << 31  # of `zstd --long=31`, the largest; memory is allocated as a frame declares it


class Damaged(Exception):
    """Zstandard data is damaged."""


BAD_ARCHIVE = (EOFError, lzma.LZMAError, zlib.error, tarfile.TarError, gzip.BadGzipFile, Damaged)
"""What reading a compressed file or an archive raises if it is damaged."""


class _Zstandard(io.RawIOBase):
    """The content of a file of Zstandard frames. Reading raises Damaged or EOFError: it is damaged or cut short."""

    def __init__(self, packed: IO[bytes]) -> None:
        super().__init__()
        self._library = library("zstandard", "Zstandard", "zstd")
        self._packed = packed
        self._frame: Any = None  # None: between two frames
        self._rest = self._ready = b""  # packed bytes behind the last frame; content that was not read yet

    def readable(self) -> bool:
        """True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """See io.RawIOBase."""
        while not self._ready:
            piece = self._rest or self._packed.read(_ZSTD_PIECE_BYTES)
            if not piece:
                if self._frame is not None:
                    raise EOFError("it ends within a Zstandard frame")
                return 0
            self._unpack(piece)
        data = self._ready[: len(buffer)]
        self._ready = self._ready[len(data) :]
        buffer[: len(data)] = data
        return len(data)

    def _unpack(self, piece: bytes) -> None:
        if self._frame is None:
            self._frame = self._library.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES).decompressobj()
        try:
            self._ready = self._frame.decompress(piece)
        except self._library.ZstdError as error:
            raise Damaged(str(error)) from error
        self._rest = b""
        if self._frame.eof:
            self._rest, self._frame = self._frame.unused_data, None


OPENERS: dict[str, Callable[[IO[bytes]], Any]] = {
    ".gz": lambda stream: gzip.GzipFile(fileobj=stream),
    ".tgz": lambda stream: gzip.GzipFile(fileobj=stream),
    ".xz": lzma.LZMAFile,
    ".txz": lzma.LZMAFile,
    ".lzma": lzma.LZMAFile,
    ".bz2": bz2.BZ2File,
    ".zst": _Zstandard,
    ".zstd": _Zstandard,
    ".tzst": _Zstandard,
}
"""By the ending of a name: what gives the content of a compressed stream."""


def compression(name: str, head: bytes) -> str | None:
    """The suffix of the compression of a file, by its name or its first bytes; None: it is not compressed."""
    suffix = "." + name.rpartition(".")[2]
    return suffix if suffix in OPENERS else packed_by(head)


def unpacking(path: Path, stream: IO[bytes]) -> IO[bytes]:
    """The content of an open file that can seek, decompressed if its first bytes or the suffix of its path say so.

    Reading raises BAD_ARCHIVE or OSError: it is damaged. Raises UserError: the library is not installed.
    """
    head = stream.read(HEAD_BYTES)
    stream.seek(-len(head), io.SEEK_CUR)
    packed = compression(path.name.lower(), head)
    return stream if packed is None else io.BufferedReader(OPENERS[packed](stream), READ_BYTES)


def read_unpacked(path: Path) -> tuple[bytes, bytes]:
    """The bytes of a file, and its content: see `unpacking`.
    Raises UserError: it cannot be read, is damaged, too large, an archive of files, or of a form that is no text.
    """
    pieces, size_bytes = [], 0
    try:
        whole = read_bytes(path, MOST_UNPACKED_BYTES)
        stream = unpacking(path, io.BytesIO(whole))
        while (piece := stream.read(READ_BYTES)) and size_bytes <= MOST_UNPACKED_BYTES:
            pieces.append(piece)
            size_bytes += len(piece)
    except BAD_ARCHIVE as error:
        raise UserError(f"{path}: damaged or cut short: {error}") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error
    content = b"".join(pieces)
    if is_tar(content):
        raise UserError(f"{path}: an archive of files: unpack it, and give one of the files")
    if known := binary_form(content[:HEAD_BYTES]):
        raise UserError(f"{path}: is {known}{': write its rows as JSON' if known in COLUMNAR else ''}")
    if size_bytes > MOST_UNPACKED_BYTES:
        raise UserError(f"{path}: more than {MOST_UNPACKED_BYTES >> 30} GiB: split it")
    return whole, content
