"""In: a number of ranks, or earlier results. Out: which backend offers which collective here; a table for docs.
Does not time anything (all_reduce.py does)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from measure import ROOT, finish, hardware, machine_line, parser, positive, say, write_json

sys.path.insert(0, str(ROOT))

from codescent.base.counted import counted
from codescent.collectives.calls import CALLS, MAX_RANKS
from codescent.collectives.survey import DEVICES, BackendSupport, Survey, columns, gpus
from codescent.collectives.table import ABSENT, cell, column_json, column_of, notes

LIMIT_S = 60.0
"""A call that takes longer counts as hanging."""


def main() -> int:
    """Call each collective of each backend and print the table, or print the tables of files. Returns the exit code."""
    parsed = parser(__doc__.splitlines()[0])
    parsed.add_argument("--ranks", type=positive, default=4, help="number of ranks")
    parsed.add_argument("--table", type=Path, nargs="+", metavar="FILE", help="print the Markdown of these results")
    arguments = parsed.parse_args()
    if arguments.table:
        if arguments.json or arguments.ranks != parsed.get_default("ranks"):
            parsed.error("--table: prints results that are there; leave out --ranks and --json")
        try:
            tables = [markdown(json.loads(file.read_text(encoding="utf-8"))) for file in arguments.table]
        except (OSError, ValueError, LookupError, TypeError) as error:
            parsed.error(f"--table: not a result of this benchmark: {error}")
        print("\n\n".join(tables))
        return 0
    if not 2 <= arguments.ranks <= MAX_RANKS:
        parsed.error(f"--ranks {arguments.ranks}: give 2 to {MAX_RANKS}: one rank sends nothing")
    record, asked, shown = hardware(), Survey(arguments.ranks, LIMIT_S), columns()
    say(machine_line(record))
    for column in shown:
        if not column.absent:
            say(column.name)
            asked.probe(column, list(CALLS))
    found = {"hardware": record, "ranks": arguments.ranks, "gpus": gpus(), "columns": [*map(column_json, shown)]}
    print(machine_line(record), "", markdown(found), sep="\n")
    write_json(arguments.json, found)
    return 0


def markdown(result: dict[str, Any]) -> str:
    """A column for each backend and device, a row for each collective; below it what the cells mean."""
    shown: list[BackendSupport] = [column_of(one) for one in result["columns"]]
    calls = list(dict.fromkeys(call for one in result["columns"] for call in one["calls"]))
    head = ["collective", *(f"{column.backend}, {DEVICES[column.device]}" for column in shown)]
    rows = [head, ["---"] * len(head), *([f"`{call}`", *(cell(column, call) for column in shown)] for call in calls)]
    lines = (" ".join(line.split()) for line in notes(shown, result["ranks"], result["gpus"]))
    said = [f"* {line.replace(f'{ABSENT} ', f'`{ABSENT}` ', 1) if line.startswith(ABSENT) else line}" for line in lines]
    about = f"{counted(result['ranks'], 'rank')}, torch {result['hardware']['torch']}:"
    return "\n".join([about, "", *(f"| {' | '.join(row)} |" for row in rows), "", *said])


if __name__ == "__main__":
    finish(main)
