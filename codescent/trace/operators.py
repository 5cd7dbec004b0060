"""In: the events of a trace. Out: how often each operator ran, and its self time: without the operators that it calls.
Does not read or write a trace."""

from __future__ import annotations

import csv
import io
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from codescent.base.errors import UserError
from codescent.base.range_names import WAITING
from codescent.base.reading import read_text

HOST, DEVICE = "host", "device"
CATEGORIES = {"cpu_op": HOST, "kernel": DEVICE, "gpu_memcpy": DEVICE, "gpu_memset": DEVICE}
"""Where events of a category run. Others, such as calls of Python functions, are no operators. Of the ranges only
WAITING is one, so that the self time of an operator has no waiting."""
COLUMNS = ("operator", "shapes", "where", "calls", "self_s", "total_s")


@dataclass(frozen=True)
class Operator:
    """One row of a table of operators.

    Attributes:
        operator: its name; of a kernel: the kernel's.
        shapes: of its inputs, where the profile records them; else "".
        where: HOST or DEVICE.
        calls: how often it ran.
        self_s: seconds in it, without the operators that it called.
        total_s: seconds in it. An operator that calls itself counts twice.
    """

    operator: str
    shapes: str
    where: str
    calls: int
    self_s: float
    total_s: float


class Operators:
    """Collects the operators of a trace: 24 bytes for each call."""

    def __init__(self) -> None:
        self.keys: dict[tuple[str, str, str], int] = {}
        self.threads: dict[tuple[object, ...], tuple[array[float], array[float], array[int]]] = {}

    def add(self, event: Mapping[str, Any]) -> None:
        """Add an event, if it is an operator."""
        where = HOST if event.get("name") == WAITING else CATEGORIES.get(event.get("cat", ""))
        if where is None or event.get("ph") != "X":
            return
        shapes = event.get("args", {}).get("Input Dims", "")
        key = (str(event["name"]), str(shapes) if shapes else "", where)
        number = self.keys.setdefault(key, len(self.keys))
        thread = (event.get("pid"), event.get("tid"), where)
        starts, ends, numbers = self.threads.setdefault(thread, (array("d"), array("d"), array("q")))
        starts.append(float(event["ts"]))
        ends.append(float(event["ts"]) + float(event.get("dur", 0)))
        numbers.append(number)

    def rows(self) -> list[Operator]:
        """A row for each operator, the largest self time first."""
        calls, self_us, total_us = ([0.0] * len(self.keys) for _ in range(3))
        for starts, ends, numbers in self.threads.values():
            for number, own_us, whole_us in _nested(starts, ends, numbers):
                calls[number] += 1
                self_us[number] += own_us
                total_us[number] += whole_us
        found = [
            Operator(name, shapes, where, int(calls[number]), self_us[number] / 1e6, total_us[number] / 1e6)
            for (name, shapes, where), number in self.keys.items()
        ]
        return sorted(found, key=lambda row: -row.self_s)


def _nested(
    starts: Sequence[float], ends: Sequence[float], numbers: Sequence[int]
) -> Iterator[tuple[int, float, float]]:
    """Of each call of a thread: its operator, microseconds without the calls inside it, and with them."""
    order = np.lexsort((-np.array(ends), np.array(starts))).tolist()
    open_calls: list[list[float]] = []  # operator, begin, end, microseconds of the calls inside
    for at in order:
        while open_calls and open_calls[-1][2] <= starts[at]:
            yield _closed(open_calls)
        open_calls.append([numbers[at], starts[at], ends[at], 0.0])
    while open_calls:
        yield _closed(open_calls)


def _closed(open_calls: list[list[float]]) -> tuple[int, float, float]:
    operator, begin, end, inside = open_calls.pop()
    if open_calls:
        open_calls[-1][3] += end - begin
    return int(operator), max(0.0, end - begin - inside), end - begin


def to_csv(rows: Iterable[Operator]) -> str:
    """The text of a file of operators."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(
        [repr(getattr(row, name)) if name[-2:] == "_s" else getattr(row, name) for name in COLUMNS] for row in rows
    )
    return text.getvalue()


def file_of(folder: Path, rank: int) -> Path:
    """The file of a rank's operators."""
    return folder / f"operators_{rank:05d}.csv"


def read_csv(path: Path) -> list[Operator]:
    """Read a file of operators. Raises UserError: it is not there, or damaged."""
    try:
        with io.StringIO(read_text(path), newline="") as file:
            rows = list(csv.reader(file))
        if not rows or tuple(rows[0]) != COLUMNS:
            raise ValueError(f"its first line is not {','.join(COLUMNS)}")
        return [Operator(row[0], row[1], row[2], int(row[3]), float(row[4]), float(row[5])) for row in rows[1:]]
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, IndexError, csv.Error) as error:
        raise UserError(f"{path}: damaged: {error}") from error
