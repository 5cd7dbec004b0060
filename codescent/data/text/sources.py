"""In: a file of text: plain, JSON lines, compressed (gz, xz, bz2), or a tar archive of them. Out: its text in blocks.
Does not hold a whole file in memory. Does not change the text (not even line ends), but drops a byte order mark.
Does not decide what a file is by its name alone: forms.py looks at the first bytes."""

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
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from codescent.base.errors import UserError
from codescent.base.reading import open_unbuffered, opener, read_bytes
from codescent.data.text.forms import HEAD_BYTES, JSON_LINES, TEXT, binary_form, form_of, is_tar, packed_by

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
MOST_PACKED = 4
"""A file is compressed so many times at most: some files unpack to themselves."""
CSV_SUFFIXES = {".csv": "CSV", ".tsv": "TSV"}
AS_TEXT = "to read it as plain text, give data.as_text = true (`codescent data`: --as-text)"
_SURROGATE = re.compile("[\ud800-\udfff]")
BAD_ARCHIVE = (EOFError, lzma.LZMAError, zlib.error, tarfile.TarError, gzip.BadGzipFile)


class DocumentPiece(NamedTuple):
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


class _Rejoined(io.RawIOBase):
    """A stream whose first bytes were read already: they come again, then the rest."""

    def __init__(self, head: bytes, rest: IO[bytes]) -> None:
        super().__init__()
        self._head, self._rest = head, rest

    def readable(self) -> bool:
        """True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """See io.RawIOBase."""
        data = self._head[: len(buffer)] or self._rest.read(len(buffer))
        self._head = self._head[len(data) :]
        buffer[: len(data)] = data
        return len(data)


@dataclass(frozen=True)
class Reading:
    """How files are read.

    Attributes:
        text_key: the key of the text in a JSON line.
        as_text: every file is plain text, whatever it looks like. What is compressed is unpacked all the same.
        noticed: called with the name of each file that is read as JSON lines although its name does not say so.
    """

    text_key: str
    as_text: bool = False
    noticed: Callable[[str], None] = lambda _: None


def read_blocks(
    path: Path, reading: Reading, watch: Callable[[memoryview], None] | None = None
) -> Generator[DocumentPiece, None, None]:
    """The text of a file, in order. The last block of each document is marked; empty documents are skipped.

    The first bytes decide what a file is (`form_of`), and these endings of its name: `.jsonl` and `.ndjson` have one
    JSON object per line, `.gz .xz .bz2` are compressed, `.tar` is an archive, `.csv` and `.tsv` are tables. An archive
    is read member by member. A file without another form is one document of UTF-8 text. At most one block, or one JSON
    line, is in memory. `watch` is called with every byte of the file once, in order, before the iteration ends.

    Raises:
        UserError: cannot be read; another form than text or JSON lines; not UTF-8 (at which byte and line); a JSON line
            without the key; damaged archive.
    """
    try:
        raw = _Watched(path, watch) if watch else open_unbuffered(path)
        with io.BufferedReader(raw, READ_BYTES) as stream:
            yield from _blocks(str(path), path.name.lower(), stream, reading)
            while stream.read(READ_BYTES):  # the hash includes bytes that a decompressor did not read
                pass
    except BAD_ARCHIVE as error:
        raise UserError(f"{path}: damaged or cut short: {error}") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error


def unpacking(path: Path, stream: IO[bytes]) -> IO[bytes]:
    """The content of an open file that can seek, decompressed if its first bytes or the suffix of its path say so
    (.gz .xz .bz2). Reading raises BAD_ARCHIVE or OSError: it is damaged.
    """
    head = stream.read(HEAD_BYTES)
    stream.seek(-len(head), io.SEEK_CUR)
    packed = _packed(path.name.lower(), head)
    return stream if packed is None else io.BufferedReader(_OPENERS[packed](stream), READ_BYTES)


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
        raise UserError(f"{path}: is {known}")
    if size_bytes > MOST_UNPACKED_BYTES:
        raise UserError(f"{path}: more than {MOST_UNPACKED_BYTES >> 30} GiB: split it")
    return whole, content


def format_hint(data: bytes) -> str:
    """What a file that is no UTF-8 text may be, by its first bytes; "" if that is unknown."""
    known = binary_form(data)
    return f"; it looks like {known}" if known else ""


def looked_at(path: Path) -> str:
    """The form of a file by its first bytes, decompressed. TEXT: it may be anything, such as an archive, or damaged."""
    try:
        with io.BufferedReader(open_unbuffered(path)) as stream:
            head = unpacking(path, stream).read(HEAD_BYTES)
    except (OSError, *BAD_ARCHIVE):
        return TEXT
    return TEXT if is_tar(head) else form_of(head, is_whole=len(head) < HEAD_BYTES)


def may_be_json_lines(path: Path) -> bool:
    """Whether a file has JSON lines, by its name or its first bytes. True for an archive: anything may be inside."""
    names = [suffix.lower() for suffix in path.suffixes]
    return not {*names}.isdisjoint((*JSONL_SUFFIXES, *TAR_SUFFIXES)) or looked_at(path) == JSON_LINES


def _packed(name: str, head: bytes) -> str | None:
    """The suffix of the compression of a file, by its name or its first bytes; None: it is not compressed."""
    suffix = "." + name.rpartition(".")[2]
    return suffix if suffix in _OPENERS else packed_by(head)


def _blocks(where: str, name: str, stream: IO[bytes], reading: Reading, times: int = 0) -> Iterator[DocumentPiece]:
    """The text of a file or of a member of an archive, which was decompressed so many `times`."""
    suffix = "." + name.rpartition(".")[2]
    head = stream.read(HEAD_BYTES)
    whole = io.BufferedReader(_Rejoined(head, stream), READ_BYTES)
    packed = _packed(name, head)
    if packed is not None and times == MOST_PACKED:
        raise UserError(f"{where}: compressed more than {MOST_PACKED} times: unpack it")
    if packed is not None:
        inner = io.BufferedReader(_OPENERS[packed](whole), READ_BYTES)
        is_archive = suffix in TAR_SUFFIXES and suffix == packed
        inner_name = name.removesuffix(packed) + (".tar" if is_archive else "")
        yield from _blocks(where, inner_name, inner, reading, times + 1)
    elif suffix in TAR_SUFFIXES or is_tar(head):
        yield from _tar_blocks(where, whole, reading, times)
    elif reading.as_text:
        yield from _text_blocks(where, whole)
    else:
        yield from _of_form(where, suffix, form_of(head, is_whole=len(head) < HEAD_BYTES), whole, reading)


def _of_form(where: str, suffix: str, form: str, stream: IO[bytes], reading: Reading) -> Iterator[DocumentPiece]:
    """The text of what is neither compressed nor an archive. Raises UserError: its form is not read."""
    if suffix in JSONL_SUFFIXES:
        yield from _json_blocks(where, stream, reading.text_key, "")
    elif form == JSON_LINES:
        reading.noticed(where)
        yield from _json_blocks(where, stream, reading.text_key, f"; {AS_TEXT}")
    elif form != TEXT:
        raise UserError(f"{where}: is {form}; {AS_TEXT}")
    elif suffix in CSV_SUFFIXES:
        raise UserError(f"{where}: is {CSV_SUFFIXES[suffix]}: write its column of texts as JSON lines; {AS_TEXT}")
    else:
        yield from _text_blocks(where, stream)


def _tar_blocks(where: str, stream: IO[bytes], reading: Reading, times: int) -> Iterator[DocumentPiece]:
    """The members in the archive's order, without hidden ones. Nothing is unpacked to disk."""
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for member in archive:
            parts = Path(member.name).parts
            if not member.isfile() or any(part.startswith(".") for part in parts if part not in (".", "..")):
                continue
            content = archive.extractfile(member)
            if content is not None:
                yield from _blocks(f"{where}: {member.name}", parts[-1].lower(), content, reading, times)


def _text_blocks(where: str, stream: IO[bytes]) -> Iterator[DocumentPiece]:
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
            yield DocumentPiece(text, False)
        if not data:
            break
        offset_bytes += len(data)
        num_lines += data.count(b"\n")
    if nonempty:
        yield DocumentPiece("", True)


def _not_utf8(where: str, error: UnicodeDecodeError, offset_bytes: int, num_lines: int) -> UserError:
    """The error for bytes that are not UTF-8; `error.object` begins at this offset and line of the file."""
    data: bytes = error.object
    line = num_lines + data[: error.start].count(b"\n") + 1
    hint = format_hint(data) if offset_bytes == 0 else ""
    return UserError(
        f"{where}: not UTF-8 text: byte 0x{data[error.start]:02x} at offset {offset_bytes + error.start} "
        f"(line {line}): {error.reason}{hint}"
    )


def _json_blocks(where: str, stream: IO[bytes], text_key: str, hint: str) -> Iterator[DocumentPiece]:
    """The text under `text_key` of each line; `hint` ends the message about a line that has none."""
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
            text = _json_text(f"{where}: line {number}", decoded, text_key, hint)
            for start in range(0, len(text), BLOCK_BYTES):
                yield DocumentPiece(text[start : start + BLOCK_BYTES], start + BLOCK_BYTES >= len(text))
        offset_bytes += len(line)


def _json_text(where: str, line: str, text_key: str, hint: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON: {error}{hint}") from error
    if not isinstance(record, dict):
        raise UserError(f"{where}: a JSON object is needed, found {type(record).__name__}{hint}")
    if text_key not in record:
        keys = ", ".join(sorted(map(str, record))[:10]) or "none"
        chat = '; conversations are read by data.task = "sft"' if isinstance(record.get("messages"), list) else ""
        raise UserError(f'{where}: no key "{text_key}" (data.text_key); its keys: {keys}{chat}{hint}')
    text = record[text_key]
    if not isinstance(text, str):
        raise UserError(f'{where}: "{text_key}" is {type(text).__name__}, not text{hint}')
    if not text.isascii() and _SURROGATE.search(text):
        raise UserError(f'{where}: "{text_key}" holds half of a surrogate pair, which is no character')
    return text
