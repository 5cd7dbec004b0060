"""In: rows of named numbers. Out: metrics.csv and metrics.jsonl of a folder; each can restore the other.
Does not know what the numbers mean, and does not load a whole file: it handles one row at a time."""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain, groupby
from pathlib import Path
from typing import Any

from codescent.base import writing
from codescent.base.durable import replace_file
from codescent.base.errors import UserError
from codescent.record.lines import append, backward, count, cut, forward, user_errors

METRICS_CSV = "metrics.csv"
METRICS_JSONL = "metrics.jsonl"
STEP = "step"

Number = float | int | None
Row = dict[str, Number]


class Rows:
    """The metrics of a folder in two files. Each row is written to metrics.csv, then to metrics.jsonl.

    If a file lacks rows, they are restored from the other file.

    Args:
        folder: folder of both files.
        columns: names of the columns, in order.
        integers: columns that are read as int, the others as float; None: each number as it is written. Rows have a
            column "step" unless `integers` is None.
    """

    def __init__(self, folder: Path, columns: Sequence[str], integers: Collection[str] | None = None) -> None:
        self.folder, self.columns, self._stepped = folder, list(columns), integers is not None
        self._convert: dict[str, Callable[[Any], Number]] = {
            name: _number if integers is None else int if name in integers else float for name in columns
        }

    @property
    def csv(self) -> Path:
        """The file metrics.csv, which is read if the files agree."""
        return self.folder / METRICS_CSV

    @property
    def jsonl(self) -> Path:
        """The file metrics.jsonl: each row is a JSON object."""
        return self.folder / METRICS_JSONL

    def append(self, row: Mapping[str, Number]) -> None:
        """Append a row to both files. A missing column is an empty field (null in JSON).

        Raises UserError: a file cannot be written.
        """
        whole = self._row(row)
        append(self.csv, _csv_line(whole), self._header())
        append(self.jsonl, json_line(whole))

    def read(self) -> Iterator[Row]:
        """All rows in order. Raises UserError: a line is not a row; the text has the line number.

        If the files differ, their rows are merged by step. Without steps, the longer file is read.
        """
        return self._rows(self.csv, strict=True) if self.files_agree() else self._of_both()

    def rewind(self, step: int) -> int:
        """Delete the rows of all steps after `step` from the end of both files. Returns their number."""
        return max(self._cut(self.csv, step), self._cut(self.jsonl, step))

    def files_agree(self) -> bool:
        """Whether both files have the same number of rows, the same last row, and the columns `columns`."""
        try:
            same = self._last(self.csv) == self._last(self.jsonl)
        except ValueError:
            return False
        return same and header_of(self.csv) == self.columns and count(self.csv) == count(self.jsonl) + 1

    def mend(self) -> tuple[int, int]:
        """Merge the rows of both files, and replace both atomically. Returns the old numbers of rows (CSV, JSONL).

        Raises UserError: a file cannot be written; or, without steps, a line is not a row.
        """
        before = max(0, count(self.csv) - 1), count(self.jsonl)
        with user_errors(self.folder):
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
        """The rows of a file. Other lines are skipped; with `strict` they raise UserError with the line number."""
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
        """`rewind` for one file. Also deletes lines at its end that are not rows."""
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
        with user_errors(path):
            if path.is_file() and path.stat().st_size != end:
                writing.cut(path, end)
        return dropped

    def _last(self, path: Path) -> str | None:
        """The last row of a file as a CSV line, so that NaN equals NaN; None: no rows. Raises ValueError: not a row."""
        begin, line = next(backward(path), (0, b""))
        none = not line if path == self.jsonl else not begin
        return None if none else _csv_line(self._parser(path)(line))

    def _parser(self, path: Path) -> Callable[[bytes], Row]:
        """A function that parses a line of this file. It raises ValueError: the line is not a row."""
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
    """metrics.csv and metrics.jsonl of a user's own training loop. The first row defines the columns.

    Rows are appended to existing files. Raises UserError: the folder cannot be created, or a file cannot be read or
    repaired.
    """

    def __init__(self, folder: Path | str) -> None:
        path = Path(folder)
        with user_errors(path):
            writing.make_parents(path)
        self._rows = Rows(path, header_of(path / METRICS_CSV) or _names(path / METRICS_JSONL))
        if self._rows.columns and not self._rows.files_agree():
            self._rows.mend()

    def append(self, row: Mapping[str, Number]) -> None:
        """Append a row, by column name. A missing or None value is an empty field (null in JSON).

        Raises:
            UserError: a name was not in the first row, or is not a valid column name; or a file cannot be written.
        """
        columns, path = self._rows.columns or list(row), self._rows.csv
        if wrong := [name for name in row if not name or set(name) & set(',"\r\n')]:
            raise UserError(f'{path}: {wrong[0]!r} is not a valid name of a column: leave out , and "')
        if more := [name for name in row if name not in columns]:
            raise UserError(
                f"{path}: has no column {', '.join(more)}, only {', '.join(columns)}: the first row must have "
                "all columns (None for values that are not known yet)"
            )
        if not self._rows.columns:
            self._rows = Rows(self._rows.folder, columns)
        self._rows.append(row)

    def __len__(self) -> int:
        """The number of rows in the files."""
        return max(count(self._rows.csv) - 1, count(self._rows.jsonl))

    def keep(self, rows: int) -> int:
        """Delete all rows after the first `rows` ones. Returns their number. Raises UserError: a file is not writable.

        The columns stay.
        """
        return max(cut(self._rows.csv, rows + 1), cut(self._rows.jsonl, rows))


def header_of(path: Path) -> list[str]:
    """The column names of a metrics.csv; empty if the file is missing or empty."""
    line = next(forward(path), b"")
    return line.decode(errors="replace").split(",") if line else []


def json_line(data: Mapping[str, Any]) -> str:
    """JSON data as one line of JSON, with a newline."""
    try:
        return json.dumps(data, allow_nan=False) + "\n"
    except (TypeError, ValueError):
        return json.dumps(strict(data), allow_nan=False) + "\n"


def strict(value: Any) -> Any:
    """Convert data to valid JSON data: NaN and infinity become the strings "nan", "inf" and "-inf"."""
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
    """The column names in the first row of a metrics.jsonl."""
    try:
        return list(_object(next(forward(path), b"{}")))
    except ValueError:
        return []


def _number(value: Any) -> Number:
    """A CSV field or a JSON value as int or float, as it is written."""
    if isinstance(value, str):
        return int(value) if value.lstrip("-").isdecimal() else float(value)
    return int(value) if isinstance(value, int) else float(value)


def _step(row: Row) -> float:
    step = row[STEP]
    assert step is not None
    return step
