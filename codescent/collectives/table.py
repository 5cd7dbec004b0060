"""In: columns with outcomes, timings. Out: the lines that show them in 80 columns, or data for programs.
Does not print and does not probe. It knows of no backend what it offers."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from codescent.base.counted import counted
from codescent.collectives.survey import COLUMNS, DEVICES, BackendSupport, CallOutcome
from codescent.collectives.task import BF16, FP32, YES, name_of
from codescent.collectives.timing import BACKEND, OURS

WIDTH = 80
ABSENT = "-"


def table(shown: Sequence[BackendSupport], calls: Sequence[str]) -> Iterator[str]:
    """Two lines of headings, then a line for each call."""
    backends = [column.backend if number % COLUMNS == 0 else "" for number, column in enumerate(shown)]
    rows = [["", *backends], ["", *(DEVICES[column.device] for column in shown)]]
    rows += [[call, *(cell(column, call) for column in shown)] for call in calls]
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def cell(column: BackendSupport, call: str) -> str:
    """What a column says of a call, in a word."""
    if column.absent:
        return ABSENT
    state = column.outcomes[name_of(call, FP32)].state
    return f"{FP32} only" if state == YES and not column.offers(call, BF16) else state


def notes(shown: Sequence[BackendSupport], ranks: int, devices: int) -> Iterator[str]:
    """What the cells mean: columns that could not be tried, and why calls do not work.

    Args:
        shown: the columns.
        ranks: of each column.
        devices: GPUs of this machine.
    """
    yield "yes: called by all ranks in fp32 and bf16, and every result is right"
    absent: dict[tuple[str, str], list[str]] = {}
    for column in shown:
        if column.absent:
            absent.setdefault((column.backend, column.absent), []).append(DEVICES[column.device])
    for (backend, why), names in absent.items():
        where = backend if len(names) == COLUMNS else f"{backend} on {' and '.join(names)}"
        yield f"{ABSENT}    {where}: {why}"
    if 0 < devices < ranks:
        yield f"GPU: {counted(ranks, 'rank')} share {counted(devices, 'GPU')}, which some backends refuse"
    for why, names in _reasons(shown).items():
        yield from textwrap.wrap(f"{'; '.join(names)}: {why}", WIDTH, subsequent_indent="     ")


def _reasons(shown: Sequence[BackendSupport]) -> dict[str, list[str]]:
    """By reason, the calls of each column that do not work for it."""
    reasons: dict[str, list[str]] = {}
    for column in shown:
        calls: dict[str, list[str]] = {}
        for name, outcome in column.outcomes.items():
            if outcome.state != YES:
                call, _, dtype = name.rpartition(" ")
                said = f"{outcome.state}: {outcome.why}"
                calls.setdefault(said, []).append(call if dtype == FP32 else f"{call} in {dtype}")
        for said, names in calls.items():
            reasons.setdefault(said, []).append(f"{column.name}: {', '.join(names)}")
    return reasons


def timing(where: str, size: str, ranks: Sequence[dict[str, Any]]) -> Iterator[str]:
    """How long both all-reduces take, and whether their results agree. `ranks`: of each, what `timing.measure` says."""
    seconds = ranks[0]["seconds"]  # of the slowest rank: the same on all
    ours_ms, backends_ms = (1e3 * statistics.median(seconds[name]) for name in (OURS, BACKEND))
    yield f"all-reduce of {size} in fp32 on {where}, median of {counted(len(seconds[OURS]), 'round')} in turns:"
    yield f"  ours {ours_ms:.3g} ms, the backend's {backends_ms:.3g} ms: {ours_ms / backends_ms:.2f} times as long"
    bits = "the same bits" if all(one["same_bits"][OURS] for one in ranks) else "DIFFERENT BITS"
    difference = max(one["difference"] for one in ranks)
    rounding = "bit for bit" if difference == 0 else f"to {difference:.1e} of the largest sum"
    yield f"  ours gives {bits} on every rank; its sums are the backend's {rounding}"


def column_json(column: BackendSupport) -> dict[str, Any]:
    """A backend on a device, for programs: by call and dtype what the call does, and why."""
    calls: dict[str, dict[str, dict[str, str]]] = {}
    for name, outcome in column.outcomes.items():
        call, _, dtype = name.rpartition(" ")
        calls.setdefault(call, {})[dtype] = {"state": outcome.state, "why": outcome.why}
    return {"backend": column.backend, "device": column.device, "absent": column.absent, "calls": calls}


def column_of(data: Mapping[str, Any]) -> BackendSupport:
    """The column of which `column_json` made the data."""
    outcomes = {
        name_of(call, dtype): CallOutcome(one["state"], one["why"])
        for call, dtypes in data["calls"].items()
        for dtype, one in dtypes.items()
    }
    return BackendSupport(data["backend"], data["device"], data["absent"], outcomes)


def timing_json(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What `timing` says, for programs: seconds of each round, and whether the results agree."""
    seconds = ranks[0]["seconds"]
    return {
        "ours_s": seconds[OURS],
        "backend_s": seconds[BACKEND],
        "times_as_long": statistics.median(seconds[OURS]) / statistics.median(seconds[BACKEND]),
        "same_bits": all(one["same_bits"][OURS] for one in ranks),
        "difference": max(one["difference"] for one in ranks),
    }
