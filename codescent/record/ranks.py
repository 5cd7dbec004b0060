"""In: the parts of a step and the memory of each rank, as means over some steps. Out: ranks.csv of a run folder.
Does not measure them (train/ranks.py does) and has no second file: what is lost is lost."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from codescent.base.errors import UserError
from codescent.record.lines import append, backward, forward, user_errors

RANKS_CSV = "ranks.csv"
INTEGERS = ("step", "rank", "steps", "peak_memory_bytes")
PARTS = ("data_s", "forward_s", "backward_s", "exposed_comm_s", "optimizer_s", "other_s")
"""Columns that sum to step_s."""
COLUMNS = ("step", "rank", "steps", "step_s", *PARTS, "peak_memory_bytes")
_HEADER = ",".join(COLUMNS)

RankRow = Mapping[str, float]


def write(folder: Path, rows: Sequence[RankRow]) -> None:
    """Append a row of COLUMNS for each rank, all in one write. Raises UserError: the file cannot be written."""
    lines = (",".join(repr(row[name]) for name in COLUMNS) for row in rows)
    append(folder / RANKS_CSV, "\n".join(lines) + "\n", _HEADER + "\n")


def read(folder: Path) -> Iterator[RankRow]:
    """All rows in order. Raises UserError: a line is not a row; the text has the line number."""
    path = folder / RANKS_CSV
    for number, line in enumerate(forward(path), start=1):
        if number > 1:
            try:
                yield _row(line)
            except ValueError as error:
                raise UserError(f"{path} line {number}: not a row of {len(COLUMNS)} numbers ({error})") from error


def rewind(folder: Path, step: int) -> None:
    """Delete the rows of all steps after `step` from the end, and what is no row there.

    Raises UserError: the file cannot be written.
    """
    path, end = folder / RANKS_CSV, 0
    for begin, line in backward(path):
        try:
            keep = begin == 0 or _row(line)["step"] <= step
        except ValueError:
            keep = False
        if keep:
            end = begin + len(line) + 1
            break
    with user_errors(path):
        if path.is_file() and path.stat().st_size != end:
            os.truncate(path, end)


def _row(line: bytes) -> RankRow:
    fields = line.decode().split(",")
    if len(fields) != len(COLUMNS):
        raise ValueError(f"{len(fields)} fields")
    return {name: int(text) if name in INTEGERS else float(text) for name, text in zip(COLUMNS, fields, strict=True)}
