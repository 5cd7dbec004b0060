"""In: rows of numbers, by the names of their columns. Out: the same rows in metrics.csv and metrics.jsonl of a folder.
Does not know what the numbers mean. Memory is bounded: a row is read or written at a time, whatever the files' size."""

from __future__ import annotations

import heapq
import json
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain, groupby
from pathlib import Path
from typing import Any

from codescent.base.durable import replace_file
from codescent.base.errors import UserError
from codescent.record.lines import append, backward, count, forward, told

METRICS_CSV = "metrics.csv"
METRICS_JSONL = "metrics.jsonl"
STEP = "step"

Number = float | int | None
Row = dict[str, Number]


class Rows:
    """The rows of a folder. A row is in metrics.csv first; what one of the two files lacks is made from the other.

    Args:
        folder: of both files.
        columns: names of the numbers, in order.
        integers: columns of whole numbers, all others being floats; None: each number is what it is written as.
    """

    def __init__(self, folder: Path, columns: Sequence[str], integers: Collection[str] | None = None) -> None:
        self.folder, self.columns, self._stepped = folder, list(columns), integers is not None
        self._convert: dict[str, Callable[[Any], Number]] = {
            name: _number if integers is None else int if name in integers else float for name in columns
        }

    @property
    def csv(self) -> Path:
        """The file that is read, where it is whole."""
        return self.folder / METRICS_CSV

    @property
    def jsonl(self) -> Path:
        """The same rows, a JSON object each."""
        return self.folder / METRICS_JSONL

    def append(self, row: Mapping[str, Number]) -> None:
        """Append one row to both files, each in one write; a name that it lacks is an empty field (null).

        Raises UserError: a file cannot be written.
        """
        whole = self._row(row)
        append(self.csv, _csv_line(whole), self._header())
        append(self.jsonl, json_line(whole))

    def read(self) -> Iterator[Row]:
        """Every row, in order. Raises UserError: a line that is no row, named.

        Where the two files differ, those of either: by their steps, or of the longer one where there are no steps.
        """
        return self._rows(self.csv, strict=True) if self.alike() else self._of_both()

    def rewind(self, step: int) -> int:
        """Cut off rows at the end that are of steps after `step`; returns how many."""
        return max(self._cut(self.csv, step), self._cut(self.jsonl, step))

    def alike(self) -> bool:
        """Whether both files have the same rows: as many, the same last one, and the columns of `columns`."""
        try:
            same = self._last(self.csv) == self._last(self.jsonl)
        except ValueError:
            return False
        return same and header_of(self.csv) == self.columns and count(self.csv) == count(self.jsonl) + 1

    def mend(self) -> tuple[int, int]:
        """Give both files the rows of either, each atomically; returns how many rows each had before.

        Raises UserError: a file cannot be written, or, where there are no steps, has a line that is no row.
        """
        before = max(0, count(self.csv) - 1), count(self.jsonl)
        with told(self.folder):
            lines = (_csv_line(row).encode() for row in self._of_both())
            replace_file(self.csv, chain([self._header().encode()], lines))
            replace_file(self.jsonl, (json_line(row).encode() for row in self._rows(self.csv)))
        return before

    def _of_both(self) -> Iterator[Row]:
        if not self._stepped:
            return self._rows(self.csv if count(self.csv) > count(self.jsonl) else self.jsonl, strict=True)
        steps = groupby(heapq.merge(self._rows(self.csv), self._rows(self.jsonl), key=_step), key=_step)
        return (next(rows) for _, rows in steps)

    def _rows(self, path: Path, *, strict: bool = False) -> Iterator[Row]:
        """Those lines of a file that are rows. Raises UserError with `strict`: a line that is none, by its number."""
        parse, header = self._parser(path), header_of(path) if path == self.csv else []
        for number, line in enumerate(forward(path), start=1):
            try:
                if number > 1 or set(header).isdisjoint(self.columns):
                    yield parse(line)
            except ValueError as error:
                if strict:
                    wanted = f"not a row of {len(self.columns)} numbers"
                    raise UserError(f"{path} line {number}: {wanted} ({error})") from error

    def _cut(self, path: Path, step: int) -> int:
        """`rewind` of one file, which also loses lines at its end that are no rows."""
        parse, dropped, end = self._parser(path), 0, 0
        for begin, line in backward(path):
            try:
                keep = parse(line)
            except ValueError:
                keep = None
            if (path == self.csv and not begin) or (keep is not None and _step(keep) <= step):
                end = begin + len(line) + 1
                break
            dropped += keep is not None
        with told(path):
            if path.is_file() and path.stat().st_size != end:
                os.truncate(path, end)
        return dropped

    def _last(self, path: Path) -> str | None:
        """The last row of a file, in a form in which NaN is NaN; None: it has none. Raises ValueError: it is no row."""
        begin, line = next(backward(path), (0, b""))
        none = not line if path == self.jsonl else not begin
        return None if none else _csv_line(self._parser(path)(line))

    def _parser(self, path: Path) -> Callable[[bytes], Row]:
        """What makes a row of a line of this file; it raises ValueError where the line is none."""
        if path == self.jsonl:
            return lambda line: self._row(_object(line))
        columns = header_of(path)
        columns = columns if set(columns) & set(self.columns) else self.columns
        return lambda line: self._row(_fields(line, columns))

    def _row(self, given: Mapping[str, Any]) -> Row:
        row: Row = {}
        try:
            for name, convert in self._convert.items():
                value = given.get(name)
                row[name] = None if value is None or value == "" else convert(value)
        except (TypeError, OverflowError) as error:
            raise ValueError(str(error)) from error
        if self._stepped and row[STEP] is None:
            raise ValueError("no step")
        return row

    def _header(self) -> str:
        return ",".join(self.columns) + "\n"


class Table:
    """metrics.csv and metrics.jsonl of a user's own loop: the columns are those of its first row.

    Existing files are continued. Raises UserError: the folder cannot be made, or a file cannot be read or mended.
    """

    def __init__(self, folder: Path | str) -> None:
        path = Path(folder)
        with told(path):
            path.mkdir(parents=True, exist_ok=True)
        self._rows = Rows(path, header_of(path / METRICS_CSV) or _names(path / METRICS_JSONL))
        if self._rows.columns and not self._rows.alike():
            self._rows.mend()

    def append(self, row: Mapping[str, Number]) -> None:
        """Append one row, by the names of its columns; an absent or None value is an empty field (null).

        Raises:
            UserError: a name that the first row did not have, or that no column can have; a file cannot be written.
        """
        columns, path = self._rows.columns or list(row), self._rows.csv
        if wrong := [name for name in row if not name or set(name) & set(',"\r\n')]:
            raise UserError(f'{path}: {wrong[0]!r} is no name of a column: leave out , and "')
        if more := [name for name in row if name not in columns]:
            raise UserError(
                f"{path}: has no column {', '.join(more)}, only {', '.join(columns)}: the first row names "
                "them all (None for what is not known yet)"
            )
        if not self._rows.columns:
            self._rows = Rows(self._rows.folder, columns)
        self._rows.append(row)


def header_of(path: Path) -> list[str]:
    """The columns of a metrics.csv; none where it is not there, or empty."""
    line = next(forward(path), b"")
    return line.decode(errors="replace").split(",") if line else []


def json_line(data: Mapping[str, Any]) -> str:
    """A line of JSON."""
    try:
        return json.dumps(data, allow_nan=False) + "\n"
    except (TypeError, ValueError):
        return json.dumps(strict(data), allow_nan=False) + "\n"


def strict(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become "nan", "inf" and "-inf", so that any reader can read the line."""
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if isinstance(value, Mapping):
        return {str(key): strict(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [strict(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _csv_line(row: Mapping[str, Number]) -> str:
    return ",".join("" if value is None else repr(value) for value in row.values()) + "\n"


def _fields(line: bytes, columns: Sequence[str]) -> dict[str, str]:
    fields = line.decode().split(",")
    if len(fields) != len(columns):
        raise ValueError(f"{len(fields)} fields")
    return dict(zip(columns, fields, strict=True))


def _object(line: bytes) -> dict[str, Any]:
    try:
        data = json.loads(line)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(data, dict):
        raise ValueError("not a JSON object")
    return data


def _names(path: Path) -> list[str]:
    """The columns that the first row of a metrics.jsonl names."""
    try:
        return list(_object(next(forward(path), b"{}")))
    except ValueError:
        return []


def _number(value: Any) -> Number:
    """The number that a field or a JSON value is, whole or not."""
    if isinstance(value, str):
        return int(value) if value.lstrip("-").isdecimal() else float(value)
    return int(value) if isinstance(value, int) else float(value)


def _step(row: Row) -> float:
    step = row[STEP]
    assert step is not None
    return step
