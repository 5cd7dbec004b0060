"""In: a file of text: plain, JSON lines, compressed (gz, xz, bz2), or a tar archive of them. Out: its text in blocks.
Does not hold a whole file in memory. Does not change the text (not even line ends), but drops a byte order mark."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import json
import lzma
import re
import tarfile
import zlib
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from codescent.base.errors import UserError
from codescent.base.reading import open_unbuffered, opener, read_bytes

READ_BYTES = 1 << 20
BLOCK_BYTES = 1 << 16  # larger decoded blocks fragment glibc's heap by hundreds of MiB
MAX_LINE_BYTES = 1 << 26  # a JSON line is in memory as a whole: 64 MiB at most
JSONL_SUFFIXES = (".jsonl", ".ndjson")
TAR_SUFFIXES = (".tar", ".tgz", ".txz")
_OPENERS: dict[str, Callable[[IO[bytes]], Any]] = {
    ".gz": lambda stream: gzip.GzipFile(fileobj=stream),
    ".tgz": lambda stream: gzip.GzipFile(fileobj=stream),
    ".xz": lzma.LZMAFile,
    ".txz": lzma.LZMAFile,
    ".lzma": lzma.LZMAFile,
    ".bz2": bz2.BZ2File,
}
MOST_UNPACKED_BYTES = 1 << 32
"""A larger file is not read as a whole."""
_FORMATS = {
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
    b"\x28\xb5\x2f\xfd": "Zstandard, which is not read: unpack it",
    b"PK\x03\x04": "a zip archive, which is not read: unpack it",
    b"\x1f\x8b": "gzip: its name must end with .gz",
    b"BZh": "bzip2: its name must end with .bz2",
    b"\xfd7zXZ": "xz: its name must end with .xz",
}
"""First bytes of files that are no UTF-8 text."""
_SURROGATE = re.compile("[\ud800-\udfff]")
BAD_ARCHIVE = (EOFError, lzma.LZMAError, zlib.error, tarfile.TarError, gzip.BadGzipFile)


class Block(NamedTuple):
    """A piece of a document: its next characters, and whether the document ends with them."""

    text: str
    ends_document: bool


class _Watched(io.FileIO):
    """A raw file that calls `watch` with all bytes as they are read (for a hash and for progress)."""

    def __init__(self, path: Path, watch: Callable[[memoryview], None]) -> None:
        super().__init__(path, opener=opener)
        self._watch = watch

    def readinto(self, buffer: Any) -> int:
        count = super().readinto(buffer) or 0
        if count:
            self._watch(memoryview(buffer)[:count])
        return count


def read_blocks(
    path: Path, text_key: str, watch: Callable[[memoryview], None] | None = None
) -> Generator[Block, None, None]:
    """The text of a file, in order. The last block of each document is marked; empty documents are skipped.

    The suffix decides: `.jsonl` and `.ndjson` have one JSON object per line with the text under `text_key`; `.gz .xz
    .bz2` are decompressed; `.tar` (also inside a compressed file of any name) is read member by member; other files
    are one document of UTF-8 text. At most one block, or one JSON line, is in memory. `watch` is called with every
    byte of the file once, in order, before the iteration ends.

    Raises:
        UserError: cannot be read; not UTF-8 (at which byte and line); a JSON line without the key; damaged archive.
    """
    try:
        raw = _Watched(path, watch) if watch else open_unbuffered(path)
        with io.BufferedReader(raw, READ_BYTES) as stream:
            yield from _blocks(str(path), path.name.lower(), stream, text_key)
            while stream.read(READ_BYTES):  # the hash includes bytes that a decompressor did not read
                pass
    except BAD_ARCHIVE as error:
        raise UserError(f"{path}: damaged or cut short: {error}") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error


def unpacking(path: Path, stream: IO[bytes]) -> IO[bytes]:
    """The content of an open file, decompressed if the suffix of its path says so (.gz .xz .bz2).
    Reading raises BAD_ARCHIVE or OSError: it is damaged.
    """
    opener = _OPENERS.get(path.suffix.lower())
    return stream if opener is None else io.BufferedReader(opener(stream), READ_BYTES)


def read_unpacked(path: Path) -> tuple[bytes, bytes]:
    """The bytes of a file, and its content: see `unpacking`.
    Raises UserError: it cannot be read, is damaged, too large, or an archive of files.
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
    if content[257:262] == b"ustar":
        raise UserError(f"{path}: an archive of files: unpack it, and give one of the files")
    if size_bytes > MOST_UNPACKED_BYTES:
        raise UserError(f"{path}: more than {MOST_UNPACKED_BYTES >> 30} GiB: split it")
    return whole, content


def format_hint(data: bytes) -> str:
    """What a file that is no UTF-8 text may be, by its first bytes; "" if that is unknown."""
    found = next((name for first, name in _FORMATS.items() if data.startswith(first)), None)
    return f"; it looks like {found}" if found else ""


def may_be_json_lines(path: Path) -> bool:
    """Whether a file has JSON lines by its name. True for what is compressed or an archive: anything may be inside."""
    return path.suffix.lower() in (*JSONL_SUFFIXES, *TAR_SUFFIXES, *_OPENERS)


def _blocks(where: str, name: str, stream: IO[bytes], text_key: str) -> Iterator[Block]:
    suffix = "." + name.rpartition(".")[2]
    if suffix in _OPENERS:
        inner = io.BufferedReader(_OPENERS[suffix](stream), READ_BYTES)
        if inner.peek(512)[257:262] == b"ustar" or suffix in TAR_SUFFIXES:
            yield from _tar_blocks(where, inner, text_key)
        else:
            yield from _blocks(where, name.removesuffix(suffix), inner, text_key)
    elif suffix in TAR_SUFFIXES:
        yield from _tar_blocks(where, stream, text_key)
    elif suffix in JSONL_SUFFIXES:
        yield from _json_blocks(where, stream, text_key)
    else:
        yield from _text_blocks(where, stream)


def _tar_blocks(where: str, stream: IO[bytes], text_key: str) -> Iterator[Block]:
    """The members in the archive's order, without hidden ones. Nothing is unpacked to disk."""
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for member in archive:
            parts = Path(member.name).parts
            if not member.isfile() or any(part.startswith(".") for part in parts if part not in (".", "..")):
                continue
            content = archive.extractfile(member)
            if content is not None:
                yield from _blocks(f"{where}: {member.name}", parts[-1].lower(), content, text_key)


def _text_blocks(where: str, stream: IO[bytes]) -> Iterator[Block]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset_bytes = num_lines = 0
    nonempty = False
    while True:
        data = stream.read(BLOCK_BYTES)
        pending_bytes = len(decoder.getstate()[0])
        try:
            text = decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            raise _not_utf8(where, error, offset_bytes - pending_bytes, num_lines) from error
        if offset_bytes == 0:
            text = text.removeprefix("\ufeff")
        if text:
            nonempty = True
            yield Block(text, False)
        if not data:
            break
        offset_bytes += len(data)
        num_lines += data.count(b"\n")
    if nonempty:
        yield Block("", True)


def _not_utf8(where: str, error: UnicodeDecodeError, offset_bytes: int, num_lines: int) -> UserError:
    """The error for bytes that are not UTF-8; `error.object` begins at this offset and line of the file."""
    data: bytes = error.object
    line = num_lines + data[: error.start].count(b"\n") + 1
    hint = format_hint(data) if offset_bytes == 0 else ""
    return UserError(
        f"{where}: not UTF-8 text: byte 0x{data[error.start]:02x} at offset {offset_bytes + error.start} "
        f"(line {line}): {error.reason}{hint}"
    )


def _json_blocks(where: str, stream: IO[bytes], text_key: str) -> Iterator[Block]:
    offset_bytes = number = 0
    while line := stream.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            raise UserError(f"{where}: line {number}: longer than {MAX_LINE_BYTES} bytes: split this document")
        try:
            decoded = line.decode()
        except UnicodeDecodeError as error:
            raise _not_utf8(where, error, offset_bytes, number - 1) from error
        if number == 1:
            decoded = decoded.removeprefix("\ufeff")
        if decoded.strip():
            text = _json_text(f"{where}: line {number}", decoded, text_key)
            for start in range(0, len(text), BLOCK_BYTES):
                yield Block(text[start : start + BLOCK_BYTES], start + BLOCK_BYTES >= len(text))
        offset_bytes += len(line)


def _json_text(where: str, line: str, text_key: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON: {error}") from error
    if not isinstance(record, dict):
        raise UserError(f"{where}: a JSON object is needed, found {type(record).__name__}")
    if text_key not in record:
        keys = ", ".join(sorted(map(str, record))[:10]) or "none"
        chat = '; conversations are read by data.task = "sft"' if isinstance(record.get("messages"), list) else ""
        raise UserError(f'{where}: no key "{text_key}" (data.text_key); its keys: {keys}{chat}')
    text = record[text_key]
    if not isinstance(text, str):
        raise UserError(f'{where}: "{text_key}" is {type(text).__name__}, not text')
    if not text.isascii() and _SURROGATE.search(text):
        raise UserError(f'{where}: "{text_key}" holds half of a surrogate pair, which is no character')
    return text
