"""In: real ranks that all-reduce a small array. Out: what each rank holds after each step, decoded, in 80 columns.
Does not compute what a rank should hold: the numbers that came through the process group say what they are sums of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from string import ascii_lowercase
from typing import Any

import torch
import torch.distributed as dist

from codescent.collectives.ring_all_reduce import RingStep, ring_all_reduce

BASE = 16
"""Digit r of a number counts how often the share of rank r is in it. With MOST ranks it fits into an int64."""
MOST = 8
WIDTH = 80
LABEL = "rank a "

Holdings = Sequence[Sequence[int]]
"""[chunk][element]: element e of chunk c counts in digit r the shares that rank r had in chunk e at the begin."""


def record() -> list[dict[str, Any]]:
    """All-reduce an array with one chunk for each rank. Returns what this rank held at first and after each step.

    Chunk c of rank r is a row of zeros, but for BASE**r at index c. So every number that a rank holds later says whose
    shares of which chunk it is the sum of. Collective.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    array = torch.diag(torch.full((ranks,), BASE**rank, dtype=torch.int64))
    states: list[dict[str, Any]] = [{"holds": array.tolist()}]

    def after(exchange: RingStep) -> None:
        states.append({**vars(exchange), "holds": array.tolist()})

    ring_all_reduce(array, after=after)
    return states


def explain(ranks: Sequence[Sequence[dict[str, Any]]]) -> Iterator[str]:
    """The lines that show the steps. `ranks` has what `record` returned on each rank."""
    num_ranks = len(ranks)
    short = _width(num_ranks, "+".join(f"a{chunk}" for chunk in range(num_ranks))) > WIDTH
    names = ", ".join(ascii_lowercase[:num_ranks])
    yield f"{num_ranks} ranks: {names}. Each has an array of {num_ranks} chunks."
    yield f"a0 is chunk 0 of rank a.{' Under chunk 0, abc is a0+b0+c0.' if short else ''}"
    yield "A > is before what a rank has just received, and added or stored."
    for moment in zip(*ranks, strict=True):
        yield ""
        yield _title(moment, num_ranks)
        if "phase" in moment[0]:
            yield "sent: " + ", ".join(
                f"{ascii_lowercase[rank]}{at['sent']} to {ascii_lowercase[at['to']]}" for rank, at in enumerate(moment)
            )
        yield from _grid(moment, short=short)
    yield ""
    yield _verdict([states[-1]["holds"] for states in ranks])


def _title(moment: Sequence[dict[str, Any]], num_ranks: int) -> str:
    at = moment[0]
    if "phase" not in at:
        return "at first"
    return f"{at['phase']}, step {at['step']} of {num_ranks - 1}"


def _grid(moment: Sequence[dict[str, Any]], *, short: bool) -> Iterator[str]:
    rows = []
    for at in moment:
        cells = [in_words(numbers, chunk, short=short) for chunk, numbers in enumerate(at["holds"])]
        rows.append([(">" if chunk == at.get("received") else " ") + cell for chunk, cell in enumerate(cells)])
    heads = [f" chunk {chunk}" for chunk in range(len(rows))]
    width = max(len(cell) for row in [heads, *rows] for cell in row)
    yield " " * len(LABEL) + "".join(head.ljust(width) for head in heads).rstrip()
    for rank, row in enumerate(rows):
        yield f"rank {ascii_lowercase[rank]} " + "".join(cell.ljust(width) for cell in row).rstrip()


def moments(ranks: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """What `explain` shows, for programs: each moment, and what each rank holds then, as sums such as "a0+b0"."""
    found = []
    for moment in zip(*ranks, strict=True):
        at = moment[0]
        holds = [
            [in_words(numbers, chunk, short=False) for chunk, numbers in enumerate(one["holds"])] for one in moment
        ]
        steps = ("sent", "to", "received", "came_from")
        moved = [{name: one[name] for name in steps} for one in moment] if "phase" in at else []
        found.append({"phase": at.get("phase"), "step": at.get("step"), "messages": moved, "holds": holds})
    return found


def in_words(numbers: Sequence[int], chunk: int, *, short: bool) -> str:
    """What the numbers of a chunk are the sum of, such as "a0+b0"; "ab" if `short`, where the chunk is the column's."""
    counts = {
        (rank, origin): number // BASE**rank % BASE
        for origin, number in enumerate(numbers)
        for rank in range(len(numbers))
    }
    shares = [(rank, origin) for (rank, origin), count in sorted(counts.items()) for _ in range(count)]
    if short and all(origin == chunk for _, origin in shares):
        return "".join(ascii_lowercase[rank] for rank, _ in shares)
    return "+".join(f"{ascii_lowercase[rank]}{origin}" for rank, origin in shares)


def _width(num_ranks: int, cell: str) -> int:
    """Columns of a line of the grid."""
    return len(LABEL) + num_ranks * (len(cell) + 1)


def _verdict(last: Sequence[Holdings]) -> str:
    whole = sum(BASE**rank for rank in range(len(last)))
    right = torch.diag(torch.full((len(last),), whole, dtype=torch.int64)).tolist()
    if any(holds != right for holds in last):
        return "WRONG: not every rank holds every sum."
    steps = 2 * (len(last) - 1)
    return f"Every rank holds every sum. Each has sent {steps} chunks: {steps / len(last):.3g} times its array."
