"""In: rows of a run, for each rank. Out: a CSV file of the run folder, read back and cut.
Does not know what the columns mean, and has no second file: what is lost is lost. (rows.py has the metrics.)"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from codescent.base.errors import UserError
from codescent.base.json_damage import json_problem
from codescent.record.lines import append, cut_later, forward

MOST_INTEGER = 2**63


@dataclass(frozen=True)
class Table:
    """A CSV file whose rows begin with a step.

    Attributes:
        name: of the file.
        columns: their names, in order; one is "step".
        integers, words: columns that are int and str; the others are float.
        optional: columns whose field may be empty: None.
    """

    name: str
    columns: tuple[str, ...]
    integers: Collection[str]
    words: Collection[str] = ()
    optional: Collection[str] = ()

    def write(self, folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append rows, all in one write. Raises UserError: the file cannot be written."""
        lines = (",".join(self._text(row[name]) for name in self.columns) for row in rows)
        append(folder / self.name, "\n".join(lines) + "\n", ",".join(self.columns) + "\n")

    def read(self, folder: Path) -> Iterator[dict[str, Any]]:
        """All rows in order. Raises UserError: a line is not a row; the text has the line number."""
        path = folder / self.name
        for number, line in enumerate(forward(path), start=1):
            if number > 1:
                try:
                    yield self._row(line)
                except ValueError as error:
                    what = f"not a row of {len(self.columns)} numbers ({json_problem(error)})"
                    raise UserError(f"{path} line {number}: {what}") from error

    def rewind(self, folder: Path, step: int) -> None:
        """Delete the rows of all steps after `step` from the end, and what is no row there.

        Raises UserError: the file cannot be written.
        """
        cut_later(folder / self.name, lambda line: not self._is_of(line, step), header=True)

    def _is_of(self, line: bytes, step: int) -> bool:
        """Whether a line is a row of the first steps."""
        try:
            return bool(self._row(line)["step"] <= step)
        except ValueError:
            return False

    def _text(self, value: Any) -> str:
        return "" if value is None else value if isinstance(value, str) else repr(value)

    def _row(self, line: bytes) -> dict[str, Any]:
        fields = line.decode().split(",")
        if len(fields) != len(self.columns):
            raise ValueError(f"{len(fields)} fields")
        return {name: self._value(name, text) for name, text in zip(self.columns, fields, strict=True)}

    def _value(self, name: str, text: str) -> Any:
        if name in self.words:
            return text
        if not text and name in self.optional:
            return None
        is_whole = name in self.integers
        try:
            value = int(text) if is_whole else float(text)
        except ValueError as error:
            raise ValueError(f"{name}: given {text[:40]!r}; must be a {'whole ' * is_whole}number") from error
        if is_whole and abs(value) >= MOST_INTEGER:
            raise ValueError(f"{name}: more than 64 bits")  # a larger one may have no float
        if not math.isfinite(value):
            raise ValueError(f"{name}: given {text}; must be a finite number")
        return value
