"""In: rows of named numbers. Out: metrics.jsonl of a folder, and metrics.csv, which is derived from it.
Does not know what the numbers mean, and does not load a whole file: it handles one row at a time."""

from __future__ import annotations

import json
import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from codescent.base import writing
from codescent.base.durable import replace_file
from codescent.base.errors import UserError
from codescent.base.json_damage import json_problem
from codescent.record.lines import append, backward, count, cut, cut_later, forward, user_errors

METRICS_CSV = "metrics.csv"
METRICS_JSONL = "metrics.jsonl"
STEP = "step"
MOST_INTEGER = 2**63
"""No step and no number of tokens or bytes is larger."""
LEAST_S, MOST_S = 1e-12, 1e12
"""No step is shorter or longer."""

Number = float | int | None
Row = dict[str, Number]


class Kind(NamedTuple):
    """What the numbers of a column are.

    Attributes:
        convert: gives the number for a JSON value. Raises TypeError, ValueError, OverflowError: it is another value.
        words: what the value must be.
    """

    convert: Callable[[Any], Number]
    words: str


def _number(value: Any) -> Number:
    """A JSON value as int or float, as it is written."""
    return int(value) if isinstance(value, int) else float(value)


def _whole(value: Any) -> int:
    number = int(value)
    if abs(number) >= MOST_INTEGER or (isinstance(value, float) and number != value):
        raise ValueError
    return number


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError
    return number


def _time(value: Any) -> float:
    number = float(value)
    if not LEAST_S <= number <= MOST_S:  # as NaN
        raise ValueError
    return number


AS_WRITTEN = Kind(_number, "a number")
FLOAT = Kind(float, "a number")
"""It may be infinite or NaN, such as a loss."""
FINITE = Kind(_finite, "a finite number")
WHOLE = Kind(_whole, "a whole number below 2^63")
TIME = Kind(_time, "seconds above 0 (1e-12 to 1e12)")


class Rows:
    """The metrics of a folder. metrics.jsonl has the rows; metrics.csv is derived from it, for other programs.

    Args:
        folder: folder of both files.
        columns: names of the columns, in order.
        kinds: of columns by name, the others are FLOAT; None: each number as it is written. Rows have a column "step"
            unless `kinds` is None.
    """

    def __init__(self, folder: Path, columns: Sequence[str], kinds: Mapping[str, Kind] | None = None) -> None:
        self.folder, self.columns, self._stepped = folder, list(columns), kinds is not None
        self._kinds = {name: AS_WRITTEN if kinds is None else kinds.get(name, FLOAT) for name in columns}
        self._csv_bytes: int | None = None
        """The size of metrics.csv as this object left it. Another size: somebody has changed the file."""

    @property
    def csv(self) -> Path:
        """The file metrics.csv, from which no row is read."""
        return self.folder / METRICS_CSV

    @property
    def jsonl(self) -> Path:
        """The file metrics.jsonl: each row is a JSON object."""
        return self.folder / METRICS_JSONL

    def append(self, row: Mapping[str, Number]) -> None:
        """Append a row to metrics.jsonl, then to metrics.csv. A missing column is null in JSON, an empty field in CSV.

        Raises UserError: a file cannot be written; or see `derive`, which is called at first, and where somebody has
        changed or deleted metrics.csv since.
        """
        if self._csv_bytes is None:
            self.derive()
        self._refuse_csv_alone()
        whole = self._row(row)
        append(self.jsonl, json_line(whole))
        if _size_bytes(self.csv) != self._csv_bytes:
            self.derive()
            return
        append(self.csv, _csv_line(whole), self._header())
        self._csv_bytes = _size_bytes(self.csv)

    def read(self) -> Iterator[Row]:
        """All rows in order.

        Raises UserError: a line is not a row (the text has its number), or metrics.jsonl is missing.
        """
        self._refuse_csv_alone()
        for number, line in enumerate(forward(self.jsonl), start=1):
            try:
                yield self._parsed(line)
            except ValueError as error:
                wanted = f"not a row of {len(self.columns)} numbers"
                raise UserError(f"{self.jsonl} line {number}: {wanted} ({json_problem(error)})") from error

    def rewind(self, step: int) -> int:
        """Delete the rows of all steps after `step`, then `derive`. Returns their number.

        Raises UserError: see `derive`.
        """
        self._refuse_csv_alone()
        try:
            deleted = cut_later(self.jsonl, lambda line: _step(self._parsed(line)) > step)
        except ValueError:  # it may be the row of a step that stays
            deque(self.read(), maxlen=0)  # raises, with the number of the line
            raise
        self.derive()
        return deleted

    def keep(self, rows: int) -> int:
        """Delete the rows after the first `rows` ones; then `derive`. Returns their number."""
        deleted = cut(self.jsonl, rows)
        self.derive()
        return deleted

    def derive(self) -> None:
        """Give metrics.csv the rows of metrics.jsonl.

        Rows that it has beyond them are cut off. If it lacks some, or is a link, it is replaced.

        Raises UserError: a line of metrics.jsonl is not a row; metrics.jsonl is missing; a file cannot be written.
        """
        self._refuse_csv_alone()
        lines = count(self.jsonl) + 1
        is_link = self.csv.is_symlink()  # it is replaced, not followed
        found = b"" if is_link else next(islice(forward(self.csv), lines - 1, None), b"")
        if not is_link and header_of(self.csv) == self.columns and found == self._last():
            cut(self.csv, lines)
        else:
            rows = (_csv_line(row).encode() for row in self.read())
            with user_errors(self.csv):
                replace_file(self.csv, chain([self._header().encode()], rows))
        self._csv_bytes = _size_bytes(self.csv)

    def _last(self) -> bytes | None:
        """The last line that metrics.csv must have, without its newline; None: metrics.jsonl ends with no row."""
        _, line = next(backward(self.jsonl), (0, b""))
        try:
            return (_csv_line(self._parsed(line)) if line else self._header()).rstrip("\n").encode()
        except ValueError:
            return None

    def _refuse_csv_alone(self) -> None:
        if not os.path.lexists(self.jsonl) and count(self.csv) > 1:
            raise UserError(
                f"{self.csv}: has rows, but {METRICS_JSONL}, of which it is a copy, is missing: put that file back, or "
                f"move {METRICS_CSV} away to go on without these rows"
            )

    def _parsed(self, line: bytes) -> Row:
        return self._row(_object(line))

    def _row(self, given: Mapping[str, Any]) -> Row:
        row: Row = {}
        for name, kind in self._kinds.items():
            value = given.get(name)
            try:
                row[name] = None if value is None or value == "" else kind.convert(value)
            except (TypeError, ValueError, OverflowError) as error:
                raise ValueError(f"{name}: given {str(value)[:40]!r}; must be {kind.words}") from error
        if self._stepped and row[STEP] is None:
            raise ValueError("no step")
        return row

    def _header(self) -> str:
        return ",".join(self.columns) + "\n" if self.columns else ""


class Table:
    """metrics.csv and metrics.jsonl of a user's own training loop. The first row defines the columns.

    Rows are appended to existing files. Raises UserError: the folder cannot be created, or see `Rows.derive`.
    """

    def __init__(self, folder: Path | str) -> None:
        path = Path(folder)
        with user_errors(path):
            writing.make_parents(path)
        self._rows = Rows(path, _names(path / METRICS_JSONL))
        self._rows.derive()

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
        """The number of rows."""
        return count(self._rows.jsonl)

    def keep(self, rows: int) -> int:
        """Delete all rows after the first `rows` ones. Returns their number. Raises UserError: a file is not writable.

        The columns stay.
        """
        return self._rows.keep(rows)


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


def _size_bytes(path: Path) -> int | None:
    """The size of a file, or of a link itself; None: there is none."""
    try:
        return path.lstat().st_size
    except OSError:
        return None


def _step(row: Row) -> float:
    step = row[STEP]
    assert step is not None
    return step
