"""In: the first bytes of a file, the ending of its name. Out: its form: text, JSON lines, a table, or one not read.
Does not read the file (sources.py does)."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator

from codescent.data.text.records import FIRST_NAMES

HEAD_BYTES = 1 << 16
"""So many bytes are looked at."""
TEXT, JSON_LINES = "text", "JSON lines"
PARQUET, ARROW_FILE, ARROW_STREAM = "Parquet", "an Arrow file", "an Arrow stream"
CSV, CSV_SEMICOLONS, TSV = "CSV", "CSV with semicolons", "TSV"
TABLES = {CSV: ",", CSV_SEMICOLONS: ";", TSV: "\t"}
"""Tables in text, with what separates their fields."""
COLUMNAR = (PARQUET, ARROW_FILE, ARROW_STREAM)
"""Tables that pyarrow reads."""
READ = (TEXT, JSON_LINES, *TABLES, *COLUMNAR)
"""The forms that can be read. Any other is refused by its name."""
JSONL_SUFFIXES = (".jsonl", ".ndjson")
_CLAIMS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(JSONL_SUFFIXES, (JSON_LINES,)),
    ".csv": (CSV, CSV_SEMICOLONS, TSV),
    ".tsv": (TSV,),
    ".parquet": (PARQUET,),
    ".arrow": (ARROW_FILE, ARROW_STREAM),
}
"""The forms that the ending of a name stands for, in the order in which they are tried."""
_SIGNATURES: tuple[tuple[int, bytes, str], ...] = (
    (0, b"PAR1", PARQUET),
    (0, b"PARE", "encrypted Parquet: write it without encryption"),
    (0, b"ARROW1\x00\x00", ARROW_FILE),
    (0, b"FEA1", "Feather of version 1: write it as Parquet"),
    (0, b"Obj\x01", "Avro: write its texts as JSON lines"),
    (0, b"PK\x03\x04", "a zip archive: unpack it"),
    (0, b"PK\x05\x06", "an empty zip archive"),
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
    (0, b"\xff\xfe\x00\x00", "UTF-32: save it as UTF-8"),
    (0, b"\x00\x00\xfe\xff", "UTF-32: save it as UTF-8"),
    (0, b"\xff\xfe", "UTF-16: save it as UTF-8"),
    (0, b"\xfe\xff", "UTF-16: save it as UTF-8"),
    (0, b"\x1f\x8b", "gzip"),
    (0, b"\xfd7zXZ", "xz"),
)
"""Place and bytes by which a form is recognised; its name, and what a user can do."""
_PLAIN = (b"%PDF-", b"{\\rtf")  # signatures of files that may have no byte that is not text
_NO_TEXT = {name for _, signature, name in _SIGNATURES if signature not in _PLAIN}
_NOT_TEXT = re.compile(rb"[\x00-\x06\x0e-\x1a]|[\x80-\xff]")
_PACKED = {
    ".gz": rb"\x1f\x8b\x08",
    ".xz": rb"\xfd7zXZ\x00",
    ".bz2": rb"BZh[1-9](1AY&SY|\x17rE8P\x90)",
    ".zst": rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18",  # a frame; a frame that is skipped (RFC 8878)
}
_ARROW_STREAM = re.compile(rb"\xff\xff\xff\xff[\x00-\xff]{2}[\x00-\x0f]\x00[\x04-\xff]\x00\x00\x00", re.DOTALL)
"""The mark, the length (below 1 MiB) and the beginning of the first message of a stream: its schema."""
_SPARSE_NULS = 8  # one NUL in so many bytes: UTF-16 or UTF-32 without a mark, or numbers
_HEADER_WORD = re.compile(r"[A-Za-z_][\w .-]{0,60}")
_SPREAD = 3  # rows, the header among them, that show a table
_OBJECT = re.compile(r'\{\s*"[^"\n]{0,200}"\s*:')
"""The beginning of a JSON object."""
_SPACE = " \t\r\n"
_BRACED = re.compile(r"""\s*\{\s*(\}|["'][^"'\n]{0,200}["']\s*:)""")
"""The beginning of a line of JSON, or of what Python prints."""
_MOSTLY = 3  # so many lines in braces, and more than half of all, are no prose


def packed_by(head: bytes) -> str | None:
    """The suffix of the compression (.gz, .xz, .bz2 or .zst) by the first bytes of a file; None: there is none."""
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


def may_be_text(form: str) -> bool:
    """Whether a file of a form that is not in READ could be read as plain text."""
    return form not in _NO_TEXT


def form_of(head: bytes, *, is_whole: bool) -> str:
    """One of READ, or the name of another form.

    Args:
        head: the first HEAD_BYTES of the content, after decompression.
        is_whole: the content ends with them.
    """
    if _ARROW_STREAM.match(head):
        return ARROW_STREAM
    if known := binary_form(head):
        return known
    if head.count(0) * _SPARSE_NULS > len(head):
        return "binary, or UTF-16 without a mark"
    text = _text_of(head)
    if text.startswith(("{", "[")) and (form := _json_form(text, is_whole)):
        return form
    if _is_mostly_json(text, is_whole):
        return "JSON on most lines, and not on the first: write one JSON object per line"
    return _table_form(text, is_whole) or TEXT


def form_named(suffix: str, head: bytes, *, is_whole: bool, text_key: str | None = None) -> str:
    """The form of a file whose name ends in `suffix`: one of READ, or the name of a form that is not read.

    The content decides. A name counts where the content may be several forms. A name of tables or of JSON lines is
    refused if the content is another known form. `text_key`: the only field of a header may have this name.
    """
    content, claimed = form_of(head, is_whole=is_whole), _CLAIMS.get(suffix, ())
    if not claimed or content in claimed or (not head and suffix not in (".parquet", ".arrow")):
        return content
    if claimed == (JSON_LINES,):  # reading says which line is none
        is_binary = content in COLUMNAR or binary_form(head) is not None
        return _mismatch(content, JSON_LINES) if is_binary else JSON_LINES
    if claimed[0] in TABLES:
        if content != TEXT:
            return _mismatch(content, claimed[0]) if content in COLUMNAR else content
        return _table_named(claimed, _text_of(head), text_key)
    return _mismatch(content, claimed[0])


def _mismatch(content: str, claimed: str) -> str:
    if content not in READ:
        return content
    return f"{content if content != TEXT else 'text, or damaged'}, and its name says {claimed}: rename or replace it"


def _text_of(head: bytes) -> str:
    return head.decode("utf-8", "ignore").removeprefix("\ufeff").lstrip(_SPACE)


def _is_mostly_json(text: str, is_whole: bool) -> bool:
    """Whether more than half of the lines begin like a JSON object."""
    lines = [line for line in (text if is_whole else text.rpartition("\n")[0]).split("\n") if line.strip()]
    braced = sum(map(bool, map(_BRACED.match, lines)))
    return braced >= _MOSTLY and 2 * braced > len(lines)


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
    except ValueError:  # a number of thousands of digits: reading says so
        return JSON_LINES if _OBJECT.match(text) else None
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
    for form, separator in TABLES.items():
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
            return form
    return None


def _table_named(claimed: tuple[str, ...], text: str, text_key: str | None) -> str:
    """The form of a table by its name and its first line. One field is a table only if it has a name of the text."""
    first = text.partition("\n")[0].rstrip("\r")
    counts = {form: len(next(_rows(first, TABLES[form]), [])) for form in claimed}
    form = max(claimed, key=lambda form: counts[form])
    if counts[form] > 1 or first.strip('"') in (*FIRST_NAMES, text_key):
        return form
    looked = "tabs" if claimed == (TSV,) else "commas, semicolons and tabs"
    names = " or ".join(FIRST_NAMES)
    return f"{form} of one field in its first line ({looked} were looked for): write a header with {names}"


def _rows(text: str, separator: str) -> Iterator[list[str]]:
    """The rows that are not empty; none at all if the text is no table."""
    try:
        yield from filter(None, csv.reader(text.splitlines(keepends=True), delimiter=separator, strict=True))
    except csv.Error:
        yield []
