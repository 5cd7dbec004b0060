"""In: the columns of a table, or the keys of a JSON object; the value of one. Out: which one is the text; its blocks.
Does not read files: lines.py and columnar.py do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from codescent.base.counted import counted
from codescent.base.errors import UserError

BLOCK_BYTES = 1 << 16  # larger decoded blocks fragment glibc's heap by hundreds of MiB
FIRST_NAMES = ("text", "content")
"""Names of columns that are taken as the text if data.text_key is "auto", in this order."""
TEXT_TYPE, NULL_TYPE = "text", "null"
MOST_SHOWN = 20


class DocumentPiece(NamedTuple):
    """A piece of a document: its next characters, and whether the document ends with them."""

    text: str
    ends_document: bool


@dataclass
class Noticed:
    """What a reader noticed in files.

    Attributes:
        forms: how files were read whose names do not say so, such as "JSON lines".
        columns: the columns that were found to be the text, without "text".
        nulls, empty: number of records that were skipped: their text is null, or has no character.
    """

    forms: set[str] = field(default_factory=set)
    columns: set[str] = field(default_factory=set)
    nulls: int = 0
    empty: int = 0

    def remarks(self) -> Iterator[str]:
        """Sentences: which column was taken, and how many records were left out because they have no text."""
        if self.columns:
            yield f'data.text_key = "auto": the text is {" or ".join(sorted(self.columns))}'
        if self.nulls:
            yield f"{counted(self.nulls, 'record')} without a text (null) left out"


@dataclass(frozen=True)
class Reading:
    """How files are read.

    Attributes:
        text_key: the column, or the key of a JSON line, that holds the text; None: it is found (`text_column`).
        as_text: every file is plain text, whatever it looks like. What is compressed is unpacked all the same.
        noticed: readers add to it.
    """

    text_key: str | None
    as_text: bool = False
    noticed: Noticed = field(default_factory=Noticed)


def text_column(where: str, columns: Mapping[str, str], reading: Reading, unit: str, hint: str = "") -> str:
    """The name of the column that holds the text: the given one, "text", "content", or the only one of strings.

    Args:
        where: the file, and the line if there is one.
        columns: the type of each; TEXT_TYPE: strings, NULL_TYPE: nulls alone.
        unit: what people call a column: "column" or "key".
        hint: ends the message.

    Raises:
        UserError: there is none, or it holds no strings; the columns are listed.
    """
    listed = [f"{name} ({kind})" for name, kind in columns.items()]
    more = [f"and {len(listed) - MOST_SHOWN} more"] if len(listed) > MOST_SHOWN else []
    shown = f"its {unit}s: {', '.join([*listed[:MOST_SHOWN], *more]) or 'none'}{hint}"
    if reading.text_key is not None:
        kind = columns.get(reading.text_key)
        if kind is None:
            raise UserError(f'{where}: no {unit} "{reading.text_key}" (data.text_key); {shown}')
        if kind not in (TEXT_TYPE, NULL_TYPE):
            raise UserError(f'{where}: {unit} "{reading.text_key}" (data.text_key) is {kind}, not text; {shown}')
        return reading.text_key
    strings = [name for name, kind in columns.items() if kind == TEXT_TYPE]
    found = [name for name in FIRST_NAMES if columns.get(name) in (TEXT_TYPE, NULL_TYPE)]
    if not found and len(strings) != 1:
        why = f"none of several {unit}s of strings is named {' or '.join(FIRST_NAMES)}" if strings else "no strings"
        raise UserError(f"{where}: which {unit} is the text? ({why}): give data.text_key; {shown}")
    name = (found or strings)[0]
    if name != FIRST_NAMES[0]:
        reading.noticed.columns.add(name)
    return name


def blocks_of(text: str | None, noticed: Noticed) -> Iterator[DocumentPiece]:
    """A document in blocks, the last one marked. No block at all, but a count: it is null, or empty."""
    if not text:
        noticed.nulls += text is None
        noticed.empty += text is not None
        return
    for start in range(0, len(text), BLOCK_BYTES):
        yield DocumentPiece(text[start : start + BLOCK_BYTES], start + BLOCK_BYTES >= len(text))
