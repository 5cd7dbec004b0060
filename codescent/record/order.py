"""In: pushes that a parameter server has applied, in order. Out: `order/server_K.jsonl` of the run folder, read again.
Does not apply pushes (coupling/parameter_server.py does; train/replay.py does it again)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from codescent.base import writing
from codescent.base.errors import UserError
from codescent.base.json_damage import json_problem
from codescent.base.reading import read_bytes
from codescent.record.lines import user_errors

FOLDER = "order"
MOST_BYTES = 16 << 30
"""Of a file of the order: it has a line for every push of a run."""
DAMAGED = ValueError, TypeError, RecursionError
"""What is raised for a line that was torn, or is no row."""


@dataclass(frozen=True)
class Applied:
    """A push that one server has applied.

    Attributes:
        worker: who computed it.
        number: of the push, counted by the worker from 1 in each command.
        base: version of this server's weights with which the worker computed.
        version: version to which the push was applied.
        step: of the portion (from 0).
        part: of the portion: which of the equal parts of the step's samples.
        first, count: with parallel.average_every: which steps the push has, counted from `step`. Else 0.
        refused: 1: the push counts, but what it sent is not finite, and has changed nothing.
    """

    worker: int
    number: int
    base: int
    version: int
    step: int
    part: int
    first: int = 0
    count: int = 0
    refused: int = 0


def file_of(run: Path, server: int) -> Path:
    """The file of a server in a run folder."""
    return run / FOLDER / f"server_{server}.jsonl"


def append(run: Path, server: int, rows: Sequence[Applied]) -> None:
    """Add rows to the file of a server."""
    add_rows(file_of(run, server), [_facts(row) for row in rows])


def add_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Add rows to a file of the order, and to the disk: they belong to a checkpoint. No row: the file is not made.

    Raises UserError: the disk is full, or the file is not writable.
    """
    if rows:
        with user_errors(path):
            writing.make_folder(path.parent)
            with writing.open_own(path, path.parent.parent, appends=True, makes=True) as file:
                writing.write_all(file, "".join(json.dumps(row) + "\n" for row in rows).encode())
                os.fsync(file.fileno())


def _facts(row: Applied) -> dict[str, int]:
    left_out = (*(() if row.count else ("first", "count")), *(() if row.refused else ("refused",)))
    return {key: value for key, value in asdict(row).items() if key not in left_out}


def rewind(run: Path, server: int, steps: int) -> int:
    """Keep the rows of the first `steps` steps: the later ones are applied anew after a resume.

    All ranks have met after these steps, so their rows come first. Returns the number of rows that are kept. They are
    too few if the machine went down before it wrote them: the run goes on, and `read` refuses them.
    """
    path = file_of(run, server)
    if not path.exists():
        return 0
    with user_errors(path):
        lines = read_bytes(path, MOST_BYTES).splitlines(keepends=True)
    number = sum(1 for _ in takewhile(lambda row: row.step < steps, _whole(lines)))
    with user_errors(path):
        writing.cut(path, sum(map(len, lines[:number])), run)
    return number


def read(run: Path, server: int, steps: int, workers: int, period: int = 1) -> list[Applied]:
    """The rows of the first `steps` steps of a server.

    Args:
        workers: parts of a step.
        period: steps of a portion.

    Raises:
        UserError: a part of a step was not applied once. Updates before it are not known, or had other workers.
    """
    path = file_of(run, server)
    try:
        rows = [_parsed(line) for line in read_bytes(path, MOST_BYTES).splitlines()]
    except (OSError, *DAMAGED) as error:
        raise UserError(f"{path}: cannot be read ({json_problem(error)})") from error
    kept = list(takewhile(lambda row: row.step < steps, rows))
    done = sorted((row.step, row.part) for row in kept if not row.count or row.first + row.count == period)
    wanted = [(step, part) for step in range(0, steps, period) for part in range(workers)]
    if done != wanted:
        raise UserError(
            f"{path}: does not have each of the {workers} parts of the first {steps} steps once: updates of before are "
            "lost, or the run was resumed with another number of workers"
        )
    return kept


def _parsed(line: bytes) -> Applied:
    row = Applied(**json.loads(line))
    refuse_other_than_numbers(asdict(row).values(), 0)
    return row


def refuse_other_than_numbers(values: Iterable[object], least: int) -> None:
    """Raise ValueError unless all are whole numbers of at least `least`."""
    if any(type(value) is not int or value < least for value in values):
        raise ValueError(f"a field of a row is no whole number of at least {least}")


def _whole(lines: Iterable[bytes]) -> Iterator[Applied]:
    """The rows before the first damaged one."""
    with suppress(*DAMAGED):
        for line in lines:
            yield _parsed(line)
