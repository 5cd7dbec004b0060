"""In: what changed the weights of a replica in asynchronous gossip. Out: `order/replica_K.jsonl`, read again.
Does not change weights (coupling/pair_exchange.py does; train/replay_gossip.py does it again)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from codescent.base import writing
from codescent.base.durable import replace_file
from codescent.base.errors import UserError
from codescent.base.json_damage import json_problem
from codescent.base.reading import read_bytes
from codescent.record.lines import user_errors
from codescent.record.order import DAMAGED, FOLDER, MOST_BYTES, add_rows, refuse_other_than_numbers
from codescent.servers.changes import AGREED, STEPPED, Changed


def file_of(run: Path, replica: int) -> Path:
    """The file of a replica in a run folder."""
    return run / FOLDER / f"replica_{replica}.jsonl"


def append(run: Path, replica: int, rows: Sequence[Changed]) -> None:
    """Add rows to the file of a replica."""
    add_rows(file_of(run, replica), [asdict(row) for row in rows])


def rewind(run: Path, replica: int, steps: int) -> None:
    """Keep what was done until the ranks had met after `steps` steps: a resume does the rest anew."""
    path = file_of(run, replica)
    if not path.exists():
        return
    if steps == 0:
        with user_errors(path):
            writing.remove_file(path, run)
        return
    with user_errors(path):
        try:
            rows = read(run, replica, steps)
        except UserError:  # the machine went down before it wrote them. The run goes on; `read` refuses this line
            replace_file(path, f"lost: rows of before step {steps}\n", within=run)
            return
        lines = read_bytes(path, MOST_BYTES).splitlines(keepends=True)
        writing.cut(path, sum(map(len, lines[: len(rows)])), run)


def _parsed(line: bytes) -> Changed:
    row = Changed(**json.loads(line))
    refuse_other_than_numbers((row.partner, row.number, row.step, row.part), -1)
    if row.kind == STEPPED:
        refuse_other_than_numbers((row.step, row.part), 0)
    return row


def read(run: Path, replica: int, steps: int) -> list[Changed]:
    """The rows of a replica, up to the meeting of all ranks after `steps` steps.

    Raises:
        UserError: the file has no such meeting, or cannot be read.
    """
    path, rows = file_of(run, replica), list[Changed]()
    try:
        for line in read_bytes(path, MOST_BYTES).splitlines():
            rows.append(_parsed(line))
            if rows[-1].kind == AGREED and rows[-1].step == steps:
                return rows
    except (OSError, *DAMAGED) as error:
        raise UserError(f"{path}: cannot be read ({json_problem(error)})") from error
    raise UserError(f"{path}: has no meeting of all ranks after {steps} steps: it is not that of this checkpoint")
