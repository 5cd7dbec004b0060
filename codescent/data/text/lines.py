"""In: a stream of bytes that holds JSON lines, or a table of CSV or TSV. Out: the text of each line or row, in blocks.
Does not hold more than one line or row in memory."""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import IO

from codescent.base.counted import counted
from codescent.base.errors import UserError
from codescent.base.json_damage import json_problem
from codescent.data.text.forms import binary_form
from codescent.data.text.records import NULL_TYPE, TEXT_TYPE, DocumentPiece, Reading, blocks_of, text_column

MAX_LINE_BYTES = 1 << 26  # a line is in memory as a whole: 64 MiB at most
_SURROGATE = re.compile("[\ud800-\udfff]")


def json_documents(where: str, stream: IO[bytes], reading: Reading, hint: str) -> Iterator[DocumentPiece]:
    """The text of each JSON line, under the key that is given or that the first line shows (`text_column`).

    `hint` ends the message about a line that cannot be read. Raises UserError: it names the line.
    """
    key = None
    for number, line in _lines(where, stream):
        if not line.strip():
            continue
        place = f"{where}: line {number}"
        record = _record(place, line, hint)
        if key is None or key not in record:
            kinds = {name: _kind(value) for name, value in record.items()}
            chat = '; conversations are read by data.task = "sft"' if isinstance(record.get("messages"), list) else ""
            wanted = reading if key is None else Reading(key)  # the key of the first line counts for all
            key = text_column(place, kinds, wanted, "key", f"{chat}{hint}")
        text = record[key]
        if text is not None and not isinstance(text, str):
            raise UserError(f'{place}: "{key}" is {type(text).__name__}, not text{hint}')
        if text and not text.isascii() and _SURROGATE.search(text):
            raise UserError(f'{place}: "{key}" holds half of a surrogate pair, which is no character')
        yield from blocks_of(text, reading.noticed)


def table_documents(
    where: str, stream: IO[bytes], separator: str, reading: Reading, hint: str
) -> Iterator[DocumentPiece]:
    """The text of each row of a table with a header. Quotes are as in RFC 4180: a quoted field may hold line ends.

    `hint` ends each message. Raises UserError: it names the line.
    """
    csv.field_size_limit(MAX_LINE_BYTES)  # 128 KiB without it
    rows = csv.reader((line for _, line in _lines(where, stream)), delimiter=separator, strict=True)
    try:
        header = next(filter(None, rows), [])
        if twice := [name for name, times in Counter(header).items() if times > 1]:
            raise UserError(f"{where}: line {rows.line_num}: the header names {', '.join(twice)} more than once{hint}")
        place = f"{where}: line {rows.line_num}"
        column = header.index(text_column(place, dict.fromkeys(header, TEXT_TYPE), reading, "column", hint))
        for row in filter(None, rows):
            if len(row) != len(header):
                found = f"{counted(len(row), 'field')}, and the header has {len(header)}"
                raise UserError(f"{where}: line {rows.line_num}: {found}{hint}")
            yield from blocks_of(row[column], reading.noticed)
    except csv.Error as error:
        lone = "a carriage return that is neither in quotes nor before a line feed"
        why = lone if str(error).startswith("new-line character") else error
        raise UserError(f"{where}: line {rows.line_num}: {why}{hint}") from error


def not_utf8(where: str, error: UnicodeDecodeError, offset_bytes: int, num_lines: int) -> UserError:
    """The error for bytes that are not UTF-8; `error.object` begins at this offset and line of the file."""
    data: bytes = error.object
    line = num_lines + data[: error.start].count(b"\n") + 1
    hint = format_hint(data) if offset_bytes == 0 else ""
    return UserError(
        f"{where}: not UTF-8 text: byte 0x{data[error.start]:02x} at offset {offset_bytes + error.start} "
        f"(line {line}): {error.reason}{hint}"
    )


def format_hint(data: bytes) -> str:
    """What a file that is no UTF-8 text may be, by its first bytes; "" if that is unknown."""
    known = binary_form(data)
    return f"; it looks like {known}" if known else ""


def _lines(where: str, stream: IO[bytes]) -> Iterator[tuple[int, str]]:
    """The lines with their numbers. Raises UserError: a line is too long, or not UTF-8."""
    offset_bytes = number = 0
    while line := stream.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            raise UserError(f"{where}: line {number}: longer than {MAX_LINE_BYTES} bytes: split this document")
        try:
            decoded = line.decode()
        except UnicodeDecodeError as error:
            raise not_utf8(where, error, offset_bytes, number - 1) from error
        yield number, decoded.removeprefix("\ufeff") if number == 1 else decoded
        offset_bytes += len(line)


def _record(place: str, line: str, hint: str) -> dict[str, object]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place}: not JSON: {json_problem(error)}{hint}") from error
    if not isinstance(record, dict):
        raise UserError(f"{place}: a JSON object is needed, found {type(record).__name__}{hint}")
    return record


def _kind(value: object) -> str:
    """The type of a value as `text_column` names it."""
    if isinstance(value, str):
        return TEXT_TYPE
    return NULL_TYPE if value is None else type(value).__name__
