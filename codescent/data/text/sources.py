"""In: a file of text: plain, JSON lines, a table, compressed, or a tar archive of them. Out: its text in blocks.
Does not hold a whole file in memory. Does not change the text (not even line ends), but drops a byte order mark.
Does not decide what a file is by its name alone: forms.py looks at the first bytes."""

from __future__ import annotations

import codecs
import io
import tarfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple, Self

from codescent.base.errors import UserError
from codescent.base.reading import open_unbuffered, opener
from codescent.data.text.columnar import columnar_documents
from codescent.data.text.compressed import BAD_ARCHIVE, OPENERS, READ_BYTES, compression, unpacking
from codescent.data.text.forms import (
    COLUMNAR,
    HEAD_BYTES,
    JSON_LINES,
    JSONL_SUFFIXES,
    READ,
    TABLES,
    TEXT,
    form_named,
    is_tar,
    may_be_text,
    packed_by,
)
from codescent.data.text.lines import json_documents, not_utf8, table_documents
from codescent.data.text.records import BLOCK_BYTES, DocumentPiece, Reading

TAR_SUFFIXES = (".tar", ".tgz", ".txz", ".tzst")
MOST_PACKED = 4
"""A file is compressed so many times at most: some files unpack to themselves."""
AS_TEXT = "to read it as plain text, give data.as_text = true (`codescent data`: --as-text)"
"""What reads a file as text, whatever its form is."""
_NAMED = {JSON_LINES: JSONL_SUFFIXES, **dict.fromkeys(TABLES, (".csv", ".tsv"))}
"""Endings of names that say the form. Under another name a reader notices it."""
_ERRORS: Any = tarfile  # typeshed does not know its errors of headers


def refused(form: str) -> str:
    """Why a file of a form that is not in READ is not read, as a clause."""
    return f"is {form}; {AS_TEXT}" if may_be_text(form) else f"is {form}"


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


class _TarMember(tarfile.TarInfo):
    """A member of an archive. tarfile alone ends in silence at a header that is damaged or cut off."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> Self:
        """See tarfile.TarInfo. Raises tarfile.ReadError: the archive is damaged or cut short."""
        assert isinstance(archive, _TarArchive)
        try:
            found = super().fromtarfile(archive)
        except _ERRORS.EOFHeaderError:
            archive.is_at_end = True
            raise
        except (_ERRORS.EmptyHeaderError, _ERRORS.TruncatedHeaderError, _ERRORS.InvalidHeaderError) as error:
            is_damaged = isinstance(error, _ERRORS.InvalidHeaderError)
            if not is_damaged and (archive.is_at_end or archive.offset == 0):  # padding; tarfile says that it is empty
                raise
            raise tarfile.ReadError(f"at byte {archive.offset} of the archive: {error}") from error
        archive.is_at_end = False
        return found


class _TarArchive(tarfile.TarFile):
    """A tar archive, or several that were put one behind the other. A block of zeros is its end."""

    tarinfo = _TarMember
    is_at_end = False


class _Opened(NamedTuple):
    """What is being read.

    Attributes:
        where: how messages name it.
        name: its name in small letters, without endings of compression.
        path: of the file; None: it is inside of another one.
        unpacked: how many times it was decompressed.
    """

    where: str
    name: str
    path: Path | None
    unpacked: int = 0


def read_blocks(
    path: Path, reading: Reading, watch: Callable[[memoryview], None] | None = None
) -> Generator[DocumentPiece, None, None]:
    """The text of a file, in order. The last block of each document is marked; empty documents are skipped.

    The first bytes decide what a file is, and the ending of its name where they leave it open (`form_named`). An
    archive is read member by member. Each line of JSON and each row of a table is a document. A file without another
    form is one document of UTF-8 text. At most one block, one line or a few rows are in memory. `watch` is called with
    every byte of the file once, in order, before the iteration ends.

    Raises:
        UserError: cannot be read; a form that is not read; not UTF-8 (at which byte and line); a JSON line without the
            key; no column of text; a damaged archive or table; a library is not installed.
    """
    try:
        raw = _Watched(path, watch) if watch else open_unbuffered(path)
        with io.BufferedReader(raw, READ_BYTES) as stream:
            yield from _blocks(_Opened(str(path), path.name.lower(), path), stream, reading)
            while watch and stream.read(READ_BYTES):  # the hash includes bytes that a decompressor did not read
                pass
    except BAD_ARCHIVE as error:
        raise UserError(f"{path}: damaged or cut short: {error}") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error


def looked_at(path: Path, text_key: str | None = None) -> str:
    """The form of a file by its first bytes, decompressed, and its name: one of READ, or the name of another form.
    TEXT: it may be anything, such as an archive, or damaged. Raises UserError: a library is not installed.
    """
    try:
        with io.BufferedReader(open_unbuffered(path)) as stream:
            head = unpacking(path, stream).read(HEAD_BYTES)
    except (OSError, *BAD_ARCHIVE):
        return TEXT
    name = path.name.lower()
    inner = name if compression(name, b"") is None else name.rpartition(".")[0]
    if is_tar(head) or packed_by(head):
        return TEXT
    return form_named(_suffix(inner), head, is_whole=len(head) < HEAD_BYTES, text_key=text_key)


def may_hold_records(path: Path) -> bool:
    """Whether a file has JSON lines or is a table, by its name or its first bytes. True for an archive: anything may be
    inside."""
    names = {suffix.lower() for suffix in path.suffixes}
    return not names.isdisjoint((*JSONL_SUFFIXES, *TAR_SUFFIXES)) or looked_at(path) != TEXT


def _suffix(name: str) -> str:
    return "." + name.rpartition(".")[2]


def _blocks(opened: _Opened, stream: IO[bytes], reading: Reading) -> Iterator[DocumentPiece]:
    """The text of a file or of a member of an archive."""
    suffix, where = _suffix(opened.name), opened.where
    head = stream.read(HEAD_BYTES)
    whole = io.BufferedReader(_Rejoined(head, stream), READ_BYTES)
    packed = compression(opened.name, head)
    if packed is not None and opened.unpacked == MOST_PACKED:
        raise UserError(f"{where}: compressed more than {MOST_PACKED} times: unpack it")
    if packed is not None:
        inner = io.BufferedReader(OPENERS[packed](whole), READ_BYTES)
        is_archive = suffix in TAR_SUFFIXES and suffix == packed
        name = opened.name.removesuffix(packed) + (".tar" if is_archive else "")
        yield from _blocks(_Opened(where, name, None, opened.unpacked + 1), inner, reading)
    elif suffix in TAR_SUFFIXES or is_tar(head):
        yield from _tar_blocks(opened, whole, reading)
    elif reading.as_text:
        yield from _text_blocks(where, whole)
    else:
        form = form_named(suffix, head, is_whole=len(head) < HEAD_BYTES, text_key=reading.text_key)
        yield from _of_form(opened, suffix, form, whole, stream, reading)


def _of_form(
    opened: _Opened, suffix: str, form: str, whole: IO[bytes], rest: IO[bytes], reading: Reading
) -> Iterator[DocumentPiece]:
    """The text of what is neither compressed nor an archive; `rest` is what follows the head of the `whole`.
    Raises UserError: its form is not read.
    """
    where, hint = opened.where, ""
    if form not in READ:
        raise UserError(f"{where}: {refused(form)}")
    if suffix not in _NAMED.get(form, (suffix,)):
        reading.noticed.forms.add(form)
        hint = f"; {AS_TEXT}"
    if form == JSON_LINES:
        yield from json_documents(where, whole, reading, hint)
    elif form in TABLES:
        yield from table_documents(where, whole, TABLES[form], reading, hint)
    elif form in COLUMNAR and opened.path is not None:
        yield from columnar_documents(opened.path, form, reading, _follower(opened.path, rest))
    elif form in COLUMNAR:
        raise UserError(f"{where}: is {form} inside of another file: unpack it")
    else:
        yield from _text_blocks(where, whole)


def _follower(path: Path, stream: IO[bytes]) -> Callable[[float], None]:
    """What reads an open file up to a share of its size: so its hash and the bar keep up with who reads it by path."""
    size_bytes = path.stat().st_size

    def follow(share: float) -> None:
        while stream.tell() < share * size_bytes and stream.read(READ_BYTES):
            pass

    return follow


def _tar_blocks(opened: _Opened, stream: IO[bytes], reading: Reading) -> Iterator[DocumentPiece]:
    """The members in the archive's order, without hidden ones. Nothing is unpacked to disk."""
    with _TarArchive.open(fileobj=stream, mode="r|", ignore_zeros=True) as archive:
        for member in archive:
            parts = Path(member.name).parts
            if not member.isfile() or any(part.startswith(".") for part in parts if part not in (".", "..")):
                continue
            content = archive.extractfile(member)
            if content is not None:
                inner = _Opened(f"{opened.where}: {member.name}", parts[-1].lower(), None, opened.unpacked)
                yield from _blocks(inner, content, reading)


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
            raise not_utf8(where, error, offset_bytes - pending_bytes, num_lines) from error
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
