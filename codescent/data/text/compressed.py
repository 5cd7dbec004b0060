"""In: an open file, or the path of one. Out: its content, decompressed (gzip, xz, bzip2, Zstandard).
Does not hold a whole file in memory, except in `read_unpacked`. Does not open archives of files."""

from __future__ import annotations

import bz2
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
_PIECE_BYTES = 1 << 12  # so many bytes unpack to 128 MiB at most: a block of 128 KiB of Zstandard takes 4 bytes or more
_ZSTD_WINDOW_BYTES = 1 << 31  # of `zstd --long=31`, the largest; memory is allocated as a frame declares it
_GZIP_BITS = 16 + zlib.MAX_WBITS  # of zlib: a header and a checksum as gzip has them


class Damaged(Exception):
    """Compressed data is damaged."""


BAD_ARCHIVE = (EOFError, tarfile.TarError, Damaged)
"""What reading a compressed file or an archive raises if it is damaged."""


class _Streams(io.RawIOBase):
    """The content of a compressed file: that of all its streams (Zstandard: frames), one after the other.

    Zeros behind a stream are padding. Reading raises Damaged: what follows is no stream, or a stream is damaged; or
    EOFError: the file has no stream, or ends within one. The readers of Python drop what follows a stream in silence.

    Args:
        packed: the compressed file.
        new: makes what decompresses one stream: an object of bz2, lzma, zlib or zstandard.
        wrong: what it raises if its input is damaged.
    """

    def __init__(self, packed: IO[bytes], new: Callable[[], Any], wrong: type[Exception]) -> None:
        super().__init__()
        self._packed, self._new, self._wrong = packed, new, wrong
        self._stream: Any = None  # None: between two streams
        self._found_any = False
        self._has_more = False  # the stream holds input whose content it has not given yet
        self._rest, self._ready = b"", memoryview(b"")  # packed bytes behind the last stream; content not read yet

    def readable(self) -> bool:
        """True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """See io.RawIOBase."""
        while not self._ready:
            piece = self._rest if self._rest or self._has_more else self._packed.read(_PIECE_BYTES)
            if not piece and not self._has_more:
                if self._stream is not None or not self._found_any:
                    raise EOFError("it ends within a compressed stream" if self._found_any else "it is empty")
                return 0
            self._unpack(piece)
        data = self._ready[: len(buffer)]
        self._ready = self._ready[len(data) :]
        buffer[: len(data)] = data
        return len(data)

    def _unpack(self, piece: bytes) -> None:
        self._rest = b""
        if self._stream is None:
            if self._found_any and not (piece := piece.lstrip(b"\0")):
                return
            self._stream, self._found_any = self._new(), True
        try:
            # bzip2 and xz say whether they have more: 4 KiB of bzip2 may unpack to gigabytes.
            most = (READ_BYTES,) if hasattr(self._stream, "needs_input") else ()
            self._ready = memoryview(self._stream.decompress(piece, *most))
        except self._wrong as error:
            raise Damaged(str(error)) from error
        self._has_more = not self._stream.eof and not getattr(self._stream, "needs_input", True)
        if self._stream.eof:
            self._rest, self._stream = self._stream.unused_data, None


def _gzip(packed: IO[bytes]) -> _Streams:
    return _Streams(packed, lambda: zlib.decompressobj(_GZIP_BITS), zlib.error)


def _xz(packed: IO[bytes]) -> _Streams:
    return _Streams(packed, lzma.LZMADecompressor, lzma.LZMAError)


def _bzip2(packed: IO[bytes]) -> _Streams:
    return _Streams(packed, bz2.BZ2Decompressor, OSError)


def _zstandard(packed: IO[bytes]) -> _Streams:
    made_by = library("zstandard", "Zstandard", "zstd")
    decompressor = made_by.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES)
    return _Streams(packed, decompressor.decompressobj, made_by.ZstdError)


OPENERS: dict[str, Callable[[IO[bytes]], _Streams]] = {
    **dict.fromkeys((".gz", ".tgz"), _gzip),
    **dict.fromkeys((".xz", ".txz", ".lzma"), _xz),
    ".bz2": _bzip2,
    **dict.fromkeys((".zst", ".zstd", ".tzst"), _zstandard),
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
