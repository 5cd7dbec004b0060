"""In: arguments of `codescent collectives`. Out: which backend offers which collective on which device, printed; the
time of our all-reduce beside the backend's; with --explain its steps.
Does not call a collective itself (collectives/ does): it refuses, and prints what was found."""

from __future__ import annotations

import os
from argparse import Namespace
from typing import TYPE_CHECKING, Any

from codescent.base.amounts import of_bytes
from codescent.base.console import new_console
from codescent.base.cores import memory_bytes
from codescent.base.counted import counted
from codescent.base.errors import UserError
from codescent.base.json_text import json_text
from codescent.base.output import say
from codescent.launch.environment import read
from codescent.results import stopped_by_signals

if TYPE_CHECKING:
    from codescent.collectives.survey import Survey

DEFAULT_RANKS, MAX_RANKS, MOST_EXPLAINED = 4, 64, 8
DEFAULT_BYTES = 16 * 2**20
MOST_S = 86_400
COPIES = 5
"""Tensors of --size that a rank holds at its peak while it is timed (collectives/timing.py)."""
ROUNDS, BUDGET_S = 9, 10.0


def main(arguments: Namespace) -> int:
    """Print the table and the timings, or the steps. Returns 0, or the code of ranks that were stopped.

    Raises:
        UserError: an argument cannot be used, or a launcher has started this process.
        RunFailed: the ranks cannot all-reduce.
    """
    _refuse(arguments)
    from codescent.collectives import survey

    devices = survey.gpus()
    ranks = arguments.ranks or (min(devices, MAX_RANKS) if devices > 1 and not arguments.explain else DEFAULT_RANKS)
    size = arguments.size or DEFAULT_BYTES
    _refuse_size(ranks, size)
    asked = survey.Survey(ranks, arguments.timeout)
    try:
        with stopped_by_signals():  # between two sets of ranks, too: their folders are removed
            if arguments.explain:
                _explain(asked, as_json=arguments.json)
            else:
                _show(asked, size, devices, as_json=arguments.json)
    except survey.RanksEnded as ended:
        return ended.code
    return 0


def _refuse(arguments: Namespace) -> None:
    """Raise UserError with all problems that can be known without torch."""
    rank, ranks, problems = read(os.environ), arguments.ranks, []
    if rank is not None and rank.world_size > 1:
        problems.append(
            f"collectives: this process is rank {rank.rank} of {rank.world_size}, numbered by {rank.launcher}; the "
            "command starts its own ranks: run it without a launcher, with --ranks N"
        )
    if arguments.timeout > MOST_S:
        problems.append(f"--timeout {arguments.timeout}: at most {MOST_S} seconds, which is a day")
    if ranks == 1:
        problems.append("--ranks 1: one rank sends nothing; give at least 2")
    if ranks is not None and ranks > (most := MOST_EXPLAINED if arguments.explain else MAX_RANKS):
        what = "can be shown in 80 columns" if arguments.explain else "can be tried on one machine"
        problems.append(f"--ranks {ranks}: at most {counted(most, 'rank')} {what}")
    if arguments.explain and arguments.size is not None:
        problems.append("--size: is of the timed all-reduces; --explain shows a small array: give one of the two")
    if problems:
        raise UserError(*problems)


def _refuse_size(ranks: int, size: int) -> None:
    """Raise UserError: the tensors need more than half of this machine's memory."""
    if (most := memory_bytes() // (2 * COPIES * ranks)) < size:
        raise UserError(
            f"--size: {of_bytes(size)} on {counted(ranks, 'rank')} need {of_bytes(COPIES * ranks * size)}, more than "
            f"half of this machine's memory; give at most {most // 2**20}MiB"
        )


def _explain(asked: Survey, *, as_json: bool) -> None:
    from codescent.collectives.holdings import explain, moments

    found = asked.explain()
    if as_json:
        print(json_text({"ranks": asked.ranks, "moments": moments(found)}))
    else:
        say(explain(found))


def _show(asked: Survey, size: int, devices: int, *, as_json: bool) -> None:
    """Probe every column, print the table, then time our all-reduce on each column where it is possible.

    `as_json`: all of it is printed as JSON when it is known.
    """
    import torch

    from codescent.collectives.calls import CALLS
    from codescent.collectives.survey import NEEDED, columns
    from codescent.collectives.table import column_json, notes, table, timing, timing_json
    from codescent.collectives.timing import timed_bytes

    console, shown, calls = new_console(stderr=as_json), columns(), list(CALLS)
    timings: list[dict[str, Any]] = []
    with console.status("") as status:
        for column in shown:
            if not column.absent:
                status.update(f"{column.name}: {counted(asked.ranks, 'rank')}")
                asked.probe(column, calls)
    if not as_json:
        say(
            [f"{counted(asked.ranks, 'rank')} on this machine, torch {torch.__version__}", "", *table(shown, calls), ""]
        )
        say(notes(shown, asked.ranks, devices))
    for column in shown:
        if all(column.offers(call) for call in NEEDED):
            with console.status(f"{column.name}: timing"):
                found = asked.time(column, size, ROUNDS, BUDGET_S)
            if not as_json:
                say(["", *timing(column.name, of_bytes(timed_bytes(size)), found)])
            timings.append({"backend": column.backend, "device": column.device, **timing_json(found)})
    if as_json:
        facts = {"ranks": asked.ranks, "torch": torch.__version__, "cuda_devices": devices}
        print(
            json_text(
                {
                    **facts,
                    "columns": list(map(column_json, shown)),
                    "size_bytes": timed_bytes(size),
                    "all_reduce": timings,
                }
            )
        )
