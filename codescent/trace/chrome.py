"""In: a file that torch's profiler has written (.json or .json.gz). Out: its head, and its events one by one.
In: a head and events. Out: such a file. Neither holds more than a few events in memory, however large the file is.
Does not know what events mean."""

from __future__ import annotations

import gzip
import io
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import IO, Any, cast

import ijson

from codescent.base.durable import replace_file
from codescent.base.errors import UserError
from codescent.base.reading import open_regular

SCHEMA = 1
"""The schemaVersion of the traces that torch 2 writes."""
EVENTS = "traceEvents"
MOST_RATIO, MOST_SMALL_BYTES = 50, 16 << 20
"""A packed file may have MOST_RATIO times its bytes when unpacked, and in any case MOST_SMALL_BYTES; torch's have 10 to
30 times."""
MOST_CHARS = 16 << 20
"""Longest event, or other value of the file. torch's are below a thousandth of it."""
MOST_DEEP = 100
"""Values inside each other in an event. torch's have 4."""
_CHUNK, _MOST_READ = 1 << 14, 1 << 20
_GZIP = b"\x1f\x8b"
_MANY_DIGITS, _TO_ZEROS = b"0" * 300, bytes.maketrans(b"123456789", b"000000000")
"""ijson's parser in C ends the process at a whole number of more digits than Python's int takes: 640 at the least."""
_BAD = (EOFError, zlib.error, gzip.BadGzipFile, UnicodeDecodeError, ValueError, ArithmeticError, ijson.JSONError)

Event = dict[str, Any]
Tokens = Iterator[tuple[str, Any]]
"""A kind, such as "start_map", and a value, from ijson."""


class ChromeTrace:
    """A trace, open for reading.

    Attributes:
        path: of the file.
        head: the values that stand before the events.

    Raises:
        UserError: the file cannot be read, is damaged, or is of a version that this program does not read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.head: dict[str, Any] = {}
        for _ in self._values():  # up to the first event
            break
        version = self.head.get("schemaVersion")
        if version != SCHEMA:
            found = "no schemaVersion" if version is None else f"schemaVersion {str(version)[:40]}"
            raise UserError(
                f"{path}: {found}: codescent reads traces of schemaVersion {SCHEMA}, which torch 2 writes: record the "
                "profile again with the torch of this installation"
            )

    def events(self) -> Iterator[Event]:
        """All events in the order of the file. Raises UserError: the file is damaged."""
        for event in self._values():
            if not isinstance(event, dict) or not isinstance(event.get("name", ""), str):
                raise UserError(f"{self.path}: damaged: an event is no object with a name")
            yield event

    def _values(self) -> Iterator[Any]:
        try:
            with open_regular(self.path) as file:
                packed = file.read(2) == _GZIP
                file.seek(0)
                yield from _elements(_Bounded(_unpacked(file) if packed else file), self.head)
        except _BAD as error:
            raise UserError(f"{self.path}: damaged: {_reason(error)}") from error
        except OSError as error:
            raise UserError(f"{self.path}: cannot be read: {error.strerror or error}") from error


def write(path: Path, head: Mapping[str, Any], lines: Iterable[str]) -> None:
    """Write a trace (.json.gz) atomically. Its file has one event a line.

    Args:
        head: values that stand before the events. schemaVersion is added.
        lines: each event as JSON, see `line_of`.

    Raises:
        OSError: the file cannot be written.
    """
    replace_file(path, _packed(_parts({"schemaVersion": SCHEMA, **head}, lines)))


class _Unpacked(gzip.GzipFile):
    """A packed file that may not unpack to much more than it has. Raises ValueError: it does."""

    most_bytes = 0

    def read(self, size: int | None = -1) -> bytes:
        """Read on, unpacked."""
        return self._bounded(super().read(size))

    def read1(self, size: int = -1) -> bytes:
        """Read on, unpacked."""
        return self._bounded(super().read1(size))

    def _bounded(self, data: bytes) -> bytes:
        if self.tell() > self.most_bytes:
            raise ValueError(f"unpacks to more than {self.most_bytes:,} bytes, {MOST_RATIO} times those of the file")
        return data


def _unpacked(file: IO[bytes]) -> IO[bytes]:
    unpacked = _Unpacked(fileobj=file)
    unpacked.most_bytes = max(MOST_SMALL_BYTES, MOST_RATIO * os.fstat(file.fileno()).st_size)
    return cast(IO[bytes], unpacked)


def _reason(error: Exception) -> str:
    """What is wrong, in one line. The parser of ijson draws the place in lines of its own."""
    if isinstance(error, ArithmeticError):
        return "a number that cannot be read"
    first = str(error).removeprefix("b'").replace("\\n", "\n").partition("\n")[0]
    if "premature EOF" in first or "Incomplete" in first:
        return "the file ends too early"
    return first[:80] or type(error).__name__


def line_of(event: Event) -> str:
    """An event as a line of a file."""
    return json.dumps(event, separators=(",", ":"))


def lines_of(path: Path) -> Iterator[str]:
    """The lines of the events of a file that `write` has written, without parsing them.

    Raises:
        UserError: the file cannot be read, or is damaged.
    """
    try:
        with open_regular(path) as packed, io.TextIOWrapper(_unpacked(packed), encoding="utf-8") as file:
            for line in file:
                if line.rstrip().endswith(f'"{EVENTS}": ['):
                    break
            for line in file:
                if line == "]}\n":
                    return
                yield line.rstrip().removesuffix(",")
            raise EOFError("the file ends before its last event")
    except _BAD as error:
        raise UserError(f"{path}: damaged: {_reason(error)}") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error


def _parts(head: Mapping[str, Any], lines: Iterable[str]) -> Iterator[str]:
    yield f'{json.dumps(head, indent=1)[:-2]},\n "{EVENTS}": ['
    between = "\n"
    for line in lines:
        yield f"{between}{line}"
        between = ",\n"
    yield "\n]}\n"


def _packed(parts: Iterable[str]) -> Iterator[bytes]:
    packer = zlib.compressobj(level=1, wbits=zlib.MAX_WBITS | 16)  # with the header of gzip
    for part in parts:
        yield packer.compress(part.encode())
    yield packer.flush()


class _Bounded:
    """A stream that may not give more than MOST_CHARS bytes without a value that is complete.

    Attributes:
        since: bytes read since then; who reads the values sets it to 0.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        self.stream, self.since = stream, 0

    def read(self, size: int) -> bytes:
        """Read on. Raises ValueError: a value has no end.

        Reads more than `size` of a long value: the parser begins a long text or number again with each piece.
        """
        data = self.stream.read(max(size, min(self.since, _MOST_READ)))
        self.since += len(data)
        if self.since > MOST_CHARS:
            raise ValueError(f"a value of more than {MOST_CHARS:,} characters")
        if _MANY_DIGITS in data.translate(_TO_ZEROS):
            raise ValueError(f"a number of more than {len(_MANY_DIGITS)} digits")
        return data


def _elements(stream: _Bounded, head: dict[str, Any]) -> Iterator[Any]:
    """The elements of traceEvents, of the one object in the stream. `head` gets the values before.

    Raises:
        ValueError, ijson.JSONError: no such object.
    """
    tokens: Tokens = ijson.basic_parse(stream, buf_size=_CHUNK)
    if next(tokens)[0] != "start_map":
        raise ValueError("no object of JSON")
    for kind, key in tokens:
        if kind == "end_map":
            raise ValueError(f"no {EVENTS}")
        if key == EVENTS:
            break
        head[key] = _value(tokens, *next(tokens))
        stream.since = 0
    if next(tokens)[0] != "start_array":
        raise ValueError(f"{EVENTS} is no list")
    for kind, value in tokens:
        if kind == "end_array":
            break
        yield _value(tokens, kind, value)
        stream.since = 0
    for _ in tokens:  # what stands after the events must be JSON, too
        pass


def _value(tokens: Tokens, kind: str, value: Any, depth: int = 0) -> Any:
    """The value that begins with this token. ijson's own builder has no bound for depth."""
    if kind == "number":
        return float(value) if isinstance(value, Decimal) else value
    if depth > MOST_DEEP:
        raise ValueError(f"more than {MOST_DEEP} values inside each other")
    if kind == "start_map":
        fields: dict[str, Any] = {}
        for kind, key in tokens:
            if kind == "end_map":
                return fields
            fields[key] = _value(tokens, *next(tokens), depth + 1)
    if kind == "start_array":
        entries: list[Any] = []
        for kind, entry in tokens:
            if kind == "end_array":
                return entries
            entries.append(_value(tokens, kind, entry, depth + 1))
    return value
