"""In: repeats of a study; or a table (CSV) that others measured. Out: study.csv; or the repeats of the table.
Does not evaluate them (evaluate.py does)."""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from codescent.base.counted import counted
from codescent.base.durable import replace_file
from codescent.base.errors import UserError
from codescent.base.published import in_words
from codescent.base.reading import read_bytes
from codescent.results import PARTS
from codescent.study.evaluate import Taken
from codescent.study.file import WORKERS
from codescent.study.marks import MarkKind, mark
from codescent.study.points import growing, name_of, shown
from codescent.study.repeat import Repeat
from codescent.study.result import Kind, PointState

STUDY_CSV = "study.csv"

MEASURED = ("step_s", "tokens", "flops", "compute_s", "mfu", "memory_bytes", "others", "wall_s")
"""Columns that are numbers of a `Repeat`."""

TIMES: Mapping[str, float] = {"step_s": 1.0, "seconds": 1.0, "minutes": 60.0}
"""Columns of a table that have the time, each with its seconds. A table has one of them."""

DIVISORS = ("tokens", "flops", "compute_s", *TIMES)
"""Columns whose numbers are above 0; all others are at least 0."""

SHORTEST_S, LONGEST_S = 1e-12, 1e12
"""Bounds of a time, so that quotients and their squares are numbers."""

MOST_NAMED = 5
"""Points that a sentence names; of more, their number."""

ROUNDING_S = -1e-6
"""Least value of a part: the rest of a step may be below 0 by rounding."""

MOST_PROBLEMS = 20
"""Lines whose problems are said; of more, their number."""

COLUMNS = (
    *("point", "repeat", "state", "why", "run"),
    *MEASURED,
    "formula",
    *("tokens_per_s", "flops_per_s", "compute_flops_per_s"),
    *PARTS,
    *("predicted_s", "load_before", "load_after", "notes"),
)
"""Columns of study.csv; those of the axes come before."""
MOST_CELL = 128 * 1024
"""Characters of a cell of a table."""


def write_table(path: Path, axes: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Write study.csv atomically. Raises UserError: it cannot be written."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [*axes, *COLUMNS], restval="", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({name: _cell(value) for name, value in row.items()})
    try:
        replace_file(path, text.getvalue())
    except OSError as error:
        raise UserError(f"{path}: {in_words(error)}") from error


def rows_of(one: Taken, others: Sequence[tuple[int, PointState, str]]) -> Iterator[dict[str, Any]]:
    """The rows of a point: one for each repeat that is done, and one for each that is not.

    Args:
        one: the point.
        others: number, state and reason of its other repeats; without any, a point without repeats has a row, too.
    """
    predicted_s = None if one.prediction is None else one.prediction["step_s"]
    common = {**one.axes, "point": one.name, "predicted_s": predicted_s}
    for repeat in one.repeats:
        yield {**common, "state": PointState.DONE, **_row(repeat)}
    for number, state, why in others:
        yield {**common, "repeat": number, "state": state, "why": why}
    if not one.repeats and not others:
        yield {**common, "state": one.state, "why": one.why}


def read_table(file: Path, kind: Kind, axes: Sequence[str]) -> list[Taken]:
    """The points of a table that others measured: one row per repeat.

    It needs a column for each axis, and one of TIMES. Rows whose column `state` is not "done" are points without
    repeats. Other columns are those of study.csv, and may be missing.

    Raises UserError: every wrong column, every cell that is no number, and every row that is longer than the table.
    """
    columns, rows = _cells(file)
    time = _time_of(file, columns, axes)
    taken: dict[str, Taken] = {}
    problems = [] if rows else [f"{file}: has no row"]
    for line, cells in rows:
        values = dict(zip(columns, [*cells, *[""] * len(columns)], strict=False))
        try:
            if any(cells[len(columns) :]):
                raise ValueError(f"{len(cells)} cells in {len(columns)} columns; a number has a point, not a comma")
            point = {name: _value(values[name]) for name in axes}
            workers, state = _workers(kind, point), _state(values.get("state") or PointState.DONE)
            before = taken.get(repr(point)) or Taken(point, workers, PointState.TO_DO)
            repeats = list(before.repeats)
            if state is PointState.DONE:
                repeats.append(_repeat(values, time, len(repeats) + 1))
        except ValueError as error:
            problems.append(f"{file} line {line}: {error}")
            continue
        state = PointState.DONE if repeats else state
        taken[repr(point)] = Taken(point, workers, state, values.get("why", ""), repeats)
    if (more := len(problems) - MOST_PROBLEMS) > 0:
        problems[MOST_PROBLEMS:] = [f"{file}: wrong, too: {counted(more, 'more line')}"]
    if problems:
        raise UserError(*problems)
    return list(taken.values())


def lacking(points: Sequence[Mapping[str, Any]], taken: Sequence[Taken], file: Path) -> list[str]:
    """A sentence about the points of a study that a table has no row of; none if it has all.

    `points`: the values of the axes of each point of the study.
    """
    there = {_key(one.axes) for one in taken}
    absent = [name_of(axes) for axes in points if _key(axes) not in there]
    if not absent:
        return []
    more = f" and {len(absent) - MOST_NAMED} more" if len(absent) > MOST_NAMED else ""
    return [
        f"{file.name} lacks {len(absent)} of {counted(len(points), 'point')} of the study: "
        f"{', '.join(absent[:MOST_NAMED])}{more}."
    ]


def _key(axes: Mapping[str, Any]) -> frozenset[tuple[str, Any]]:
    """The values of axes, alike where a table and a study file write them in two ways: 4 and 4.0, true and True."""
    return frozenset((name, value if _is_number(value) else shown(value).lower()) for name, value in axes.items())


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _cells(file: Path) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """The columns of a table, and its rows that are not empty, each with its line. Raises UserError: it is no table."""
    try:
        with io.StringIO(read_bytes(file).decode("utf-8-sig"), newline="") as stream:
            csv.field_size_limit(MOST_CELL)  # a reader of a corpus may have set another one
            reader = csv.reader(stream)
            lines = [(reader.line_num, [cell.strip() for cell in row]) for row in reader if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        why = "not UTF-8 text" if isinstance(error, UnicodeDecodeError) else getattr(error, "strerror", None) or error
        raise UserError(f"{file}: cannot be read: {why}") from error
    columns = lines[0][1] if lines else []
    if len(columns) == 1 and any(mark in columns[0] for mark in ";\t|"):
        raise UserError(f"{file}: has one column, {columns[0]!r}: a comma must separate columns")
    return columns, lines[1:]


def _time_of(file: Path, columns: Sequence[str], axes: Sequence[str]) -> str:
    """The column that has the time. Raises UserError: a column is missing, or is there twice."""
    times = [name for name in TIMES if name in columns]
    problems = [f"{file}: has no column {name}: the study has this axis" for name in axes if name not in columns]
    if not times:
        problems.append(f"{file}: has no column for the time: {', '.join(TIMES)}")
    if len(times) > 1:
        problems.append(f"{file}: has several columns for the time ({', '.join(times)}); leave one")
    twice = [name for name, number in Counter(columns).items() if number > 1 and name in {*axes, *TIMES, *COLUMNS}]
    problems += [f"{file}: has the column {name} twice; leave one" for name in twice]
    if problems:
        raise UserError(*problems)
    return times[0]


def _workers(kind: Kind, point: Mapping[str, Any]) -> int | None:
    """The number of workers of a point. Raises ValueError: the axis that grows has no whole number."""
    axis, found = WORKERS.get(kind), growing(kind, point)
    if axis is not None and axis in point and not found:
        raise ValueError(f"{axis}: given {point[axis]!r}; must be a whole number of at least 1")
    return found


def _state(text: str) -> PointState:
    if text not in list(PointState):
        raise ValueError(f"state: given {text!r}; must be {', '.join(PointState)}, or empty")
    return PointState(text)


def _row(repeat: Repeat) -> dict[str, Any]:
    """The columns of a repeat that is done."""
    before, after = repeat.load or (None, None)
    tokens, flops = repeat.tokens, repeat.flops
    return {
        "repeat": repeat.number,
        "run": repeat.run,
        **{name: getattr(repeat, name) for name in MEASURED},
        "formula": repeat.formula,
        "tokens_per_s": tokens / repeat.step_s if tokens else None,
        "flops_per_s": flops / repeat.step_s if flops else None,
        "compute_flops_per_s": flops / repeat.compute_s if flops and repeat.compute_s else None,
        **repeat.parts_s,
        "load_before": before,
        "load_after": after,
        "notes": "; ".join(map(str, repeat.notes)),
    }


def _repeat(values: Mapping[str, str], time: str, number: int) -> Repeat:
    """A repeat out of a row. Raises ValueError: a cell is no number, or the time is not above 0."""
    numbers = {name: _number(name, values[name]) for name in (*MEASURED, *PARTS, time) if values.get(name)}
    step_s = numbers.pop(time, 0.0) * TIMES[time]
    if not SHORTEST_S <= step_s <= LONGEST_S:
        wanted = f"above 0 (from {SHORTEST_S:g} to {LONGEST_S:g} s)"
        raise ValueError(f"{time}: given {values.get(time)!r}; must be a number {wanted}")
    parts = {name: numbers.pop(name) for name in PARTS if name in numbers}
    memory = numbers.pop("memory_bytes", None)
    rest: dict[str, Any] = {name: numbers.get(name) for name in MEASURED if name not in ("step_s", "memory_bytes")}
    texts = filter(None, values.get("notes", "").split("; "))
    notes = tuple(mark(MarkKind.NOTED, text=text) for text in texts)
    if parts and len(parts) == len(PARTS) and rest["compute_s"] is None:
        rest["compute_s"] = parts["forward_s"] + parts["backward_s"] or None
    return Repeat(
        step_s=step_s,
        number=number,
        parts_s=parts if len(parts) == len(PARTS) else {},
        memory_bytes=None if memory is None else int(memory),
        notes=notes,
        **rest,
    )


def _number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or "_" in text:  # Python reads 1_0 as ten
        raise ValueError(f"{name}: given {text!r}; must be a number, with a point and no unit")
    least = ROUNDING_S if name in PARTS else 0.0
    if value < least or (value == 0 and name in DIVISORS):
        raise ValueError(f"{name}: given {text!r}; must be a number {'above' if name in DIVISORS else 'of at least'} 0")
    return value


def _value(text: str) -> Any:
    """A value of an axis: a number if it is one."""
    for kind in (int, float):
        try:
            return text if "_" in text else kind(text)
        except ValueError:
            continue
    return text


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return repr(value) if isinstance(value, float) else str(value)
