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
from pathlib import Path
from typing import IO, Any, cast

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
_CHUNK = 1 << 20
_GZIP = b"\x1f\x8b"
_BAD = (EOFError, zlib.error, gzip.BadGzipFile, UnicodeDecodeError, ValueError, RecursionError)
_DECODER = json.JSONDecoder()

Event = dict[str, Any]


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
                plain = _unpacked(file) if packed else file
                yield from _Parser(io.TextIOWrapper(plain, encoding="utf-8")).events(self.head)
        except _BAD as error:
            raise UserError(f"{self.path}: damaged: {str(error)[:80] or type(error).__name__}") from error
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
        raise UserError(f"{path}: damaged: {str(error)[:80] or type(error).__name__}") from error
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


class _Parser:
    """Reads one JSON object, whose value of traceEvents is an array, piece by piece."""

    def __init__(self, stream: IO[str]) -> None:
        self.stream, self.text, self.at, self.ended = stream, "", 0, False

    def events(self, head: dict[str, Any]) -> Iterator[Any]:
        """The elements of traceEvents. `head` gets the values before. Raises ValueError: no such object."""
        self._expect("{")
        while True:
            key = self._value()
            self._expect(":")
            if key == EVENTS:
                break
            head[str(key)] = self._value()
            if self._next() != ",":
                raise ValueError(f"no {EVENTS}")
            self.at += 1
        self._expect("[")
        if self._next() == "]":
            self.at += 1
        else:
            yield self._value()
            while self._next() == ",":
                self.at += 1
                yield self._value()
            self._expect("]")
        while self._next() == ",":  # values after the events
            self.at += 1
            self._value()
            self._expect(":")
            self._value()
        self._expect("}")

    def _next(self) -> str:
        """The next character that is no space."""
        while True:
            while self.at < len(self.text):
                if self.text[self.at] not in " \n\r\t":
                    return self.text[self.at]
                self.at += 1
            if not self._more():
                raise ValueError("the file ends too early")

    def _expect(self, character: str) -> None:
        if (found := self._next()) != character:
            raise ValueError(f"{found!r} where {character!r} must stand")
        self.at += 1

    def _value(self) -> Any:
        self._next()
        while True:
            try:
                value, end = _DECODER.raw_decode(self.text, self.at)
            except json.JSONDecodeError:
                if not self._more():
                    raise
                continue
            if end < len(self.text) or not self._more():  # else a number may go on
                self.at = end
                return value

    def _more(self) -> bool:
        """Read on. False: the file has ended. Raises ValueError: a value is longer than MOST_CHARS."""
        rest = self.text[self.at :]
        if len(rest) > MOST_CHARS:
            raise ValueError(f"a value of more than {MOST_CHARS:,} characters")
        new = self.stream.read(max(_CHUNK, len(rest)))
        self.text, self.at = rest + new, 0
        return bool(new)
