"""In: pushes that a parameter server has applied, in order. Out: `order/server_K.jsonl` of the run folder, read again.
Does not apply pushes (train/serve.py does; train/replay.py does it again)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from codescent.base.errors import UserError

FOLDER = "order"


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
    """

    worker: int
    number: int
    base: int
    version: int
    step: int
    part: int
    first: int = 0
    count: int = 0


def file_of(run: Path, server: int) -> Path:
    """The file of a server in a run folder."""
    return run / FOLDER / f"server_{server}.jsonl"


def append(run: Path, server: int, rows: Sequence[Applied]) -> None:
    """Add rows to the file of a server."""
    if rows:
        path = file_of(run, server)
        path.parent.mkdir(exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(_facts(row)) + "\n" for row in rows)


def _facts(row: Applied) -> dict[str, int]:
    found = asdict(row)
    return found if row.count else {key: value for key, value in found.items() if key not in ("first", "count")}


def rewind(run: Path, server: int, pushes: int) -> None:
    """Keep the first `pushes` rows of a server: the later ones are applied anew after a resume."""
    path = file_of(run, server)
    if path.exists():
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(lines[:pushes]))


def read(run: Path, server: int, pushes: int) -> list[Applied]:
    """The first `pushes` rows of a server. Raises UserError: they are not there."""
    path = file_of(run, server)
    try:
        rows = [Applied(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()[:pushes]]
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from error
    if len(rows) < pushes:
        raise UserError(f"{path}: has {len(rows)} pushes, the checkpoint {pushes}: other updates came before them")
    return rows
