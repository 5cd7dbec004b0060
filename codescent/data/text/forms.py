"""In: the first bytes of a file. Out: the form of its content: text, JSON lines, or the name of another form.
Does not look at the file's name and does not read the file (sources.py does)."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator

HEAD_BYTES = 1 << 16
"""So many bytes are looked at."""
TEXT, JSON_LINES = "text", "JSON lines"
_SIGNATURES: tuple[tuple[int, bytes, str], ...] = (
    (0, b"PAR1", "Parquet: write its column of texts as JSON lines"),
    (0, b"ARROW1", "Arrow: write its column of texts as JSON lines"),
    (0, b"Obj\x01", "Avro: write its texts as JSON lines"),
    (0, b"PK\x03\x04", "a zip archive: unpack it"),
    (0, b"PK\x05\x06", "an empty zip archive"),
    (0, b"\x28\xb5\x2f\xfd", "Zstandard: unpack it"),
    (0, b"\x04\x22\x4d\x18", "LZ4: unpack it"),
    (0, b"7z\xbc\xaf\x27\x1c", "a 7-Zip archive: unpack it"),
    (0, b"Rar!\x1a\x07", "a RAR archive: unpack it"),
    (0, b"\x1f\x9d", "compressed by `compress`: unpack it"),
    (0, b"\x89PNG\r\n\x1a\n", "a PNG image"),
    (0, b"\xff\xd8\xff", "a JPEG image"),
    (0, b"GIF87a", "a GIF image"),
    (0, b"GIF89a", "a GIF image"),
    (0, b"II*\x00", "a TIFF image"),
    (0, b"MM\x00*", "a TIFF image"),
    (8, b"WEBP", "a WebP image"),
    (8, b"WAVE", "a WAV recording"),
    (4, b"ftyp", "an MP4 film or recording"),
    (0, b"ID3", "an MP3 recording"),
    (0, b"OggS\x00", "an Ogg recording"),
    (0, b"fLaC\x00", "a FLAC recording"),
    (0, b"%PDF-", "a PDF: extract its text"),
    (0, b"{\\rtf", "an RTF document: save it as text"),
    (0, b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "an old Office document: save it as text"),
    (0, b"\x89HDF\r\n\x1a\n", "HDF5"),
    (0, b"\x93NUMPY", "a numpy array"),
    (0, b"SQLite format 3\x00", "an SQLite database"),
    (0, b"\x7fELF", "a program"),
    (0, b"\xff\xfe", "UTF-16: save it as UTF-8"),
    (0, b"\xfe\xff", "UTF-16: save it as UTF-8"),
    (0, b"\x1f\x8b", "gzip"),
    (0, b"\xfd7zXZ", "xz"),
)
"""Place and bytes by which a form is recognised; its name, and what a user can do."""
_PLAIN = (b"%PDF-", b"{\\rtf")  # signatures of files that may have no byte that is not text
_NOT_TEXT = re.compile(rb"[\x00-\x06\x0e-\x1a]|[\x80-\xff]")
_PACKED = {".gz": rb"\x1f\x8b\x08", ".xz": rb"\xfd7zXZ\x00", ".bz2": rb"BZh[1-9](1AY&SY|\x17rE8P\x90)"}
_SPARSE_NULS = 8  # one NUL in so many bytes: UTF-16 or UTF-32 without a mark, or numbers
_HEADER_WORD = re.compile(r"[A-Za-z_][\w .-]{0,60}")
_SPREAD = 3  # rows, the header among them, that show a table
_OBJECT = re.compile(r'\{\s*"[^"\n]{0,200}"\s*:')
"""The beginning of a JSON object."""
_SPACE = " \t\r\n"


def packed_by(head: bytes) -> str | None:
    """The suffix of the compression (.gz, .xz or .bz2) by the first bytes of a file; None: there is none."""
    return next((suffix for suffix, pattern in _PACKED.items() if re.match(pattern, head)), None)


def is_tar(head: bytes) -> bool:
    """Whether a file is a tar archive, by its first 512 bytes."""
    return head[257:262] == b"ustar"


def binary_form(head: bytes) -> str | None:
    """The name of a form that is no text, by its first bytes; None: it is not known."""
    for place, signature, name in _SIGNATURES:
        if head.startswith(signature, place) and (signature in _PLAIN or _NOT_TEXT.search(head[:4096])):
            return name
    return None


def form_of(head: bytes, *, is_whole: bool) -> str:
    """TEXT, JSON_LINES, or the name of another form.

    Args:
        head: the first HEAD_BYTES of the content, after decompression.
        is_whole: the content ends with them.
    """
    if known := binary_form(head):
        return known
    if head.count(0) * _SPARSE_NULS > len(head):
        return "binary, or UTF-16 without a mark"
    text = head.decode("utf-8", "ignore").removeprefix("\ufeff").lstrip(_SPACE)
    if text.startswith(("{", "[")) and (form := _json_form(text, is_whole)):
        return form
    return _table_form(text, is_whole) or TEXT


def _json_form(text: str, is_whole: bool) -> str | None:
    """The form of a text that begins like JSON; None: it is not JSON."""
    try:
        value, end = json.JSONDecoder().raw_decode(text)
    except json.JSONDecodeError as error:
        at_end = error.pos >= len(text) - 8 or error.msg.startswith("Unterminated string")
        if is_whole or not at_end:
            return JSON_LINES if _OBJECT.match(text) else None  # reading says what is wrong with it
        value, end = None, len(text)  # the rest is not in the head
    except RecursionError:
        return _DOCUMENT
    if text.startswith("["):
        holds = text[1:].lstrip(_SPACE)[:1]
        return _ARRAY if holds in ("{", "[", '"') and value != [] else None
    follows = text[end:].lstrip(_SPACE)[:1]
    if value == {} and follows != "{":
        return None
    if "\n" in text[:end].rstrip(_SPACE):
        return _DOCUMENT if follows in ("", "{") else None
    return JSON_LINES


_DOCUMENT = "one JSON document: write one JSON object per line"
_ARRAY = "a JSON array: write one JSON object per line"


def _table_form(text: str, is_whole: bool) -> str | None:
    """CSV or TSV by its header of names and rows of equally many fields; None: it is no table."""
    for separator, name in ((",", "CSV"), (";", "CSV"), ("\t", "TSV")):
        header = text.partition("\n")[0].rstrip("\r").split(separator)
        names = [word.strip('"') for word in header]
        if len(names) < 2 or len({*names}) < len(names) or not all(map(_HEADER_WORD.fullmatch, names)):
            continue
        if any(word != word.strip() for word in header):
            continue
        rows = list(_rows(text if is_whole else text.rpartition("\n")[0], separator))
        if not is_whole:
            rows = rows[:-1]  # a quoted field may go on
        if len(rows) >= _SPREAD and {*map(len, rows)} == {len(names)}:
            return f"{name}: write its column of texts as JSON lines"
    return None


def _rows(text: str, separator: str) -> Iterator[list[str]]:
    """The rows that are not empty; none at all if the text is no table."""
    try:
        yield from filter(None, csv.reader(text.splitlines(keepends=True), delimiter=separator, strict=True))
    except csv.Error:
        yield []
