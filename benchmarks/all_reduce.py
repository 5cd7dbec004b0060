"""In: a number of ranks, a size. Out: the time of our all-reduce out of sends and receives, over that of gloo's own.
Does not probe what gloo offers (codescent collectives does). Writes a temporary folder."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from typing import Any

from measure import ROOT, finish, hardware, machine_line, must, must_lines, parser, positive, say, table, write_json

sys.path.insert(0, str(ROOT))

from codescent.base.amounts import of_bytes
from codescent.base.cores import available_cores
from codescent.base.sizes import size_bytes
from codescent.collectives.calls import MAX_RANKS
from codescent.collectives.survey import BackendSupport, RanksEnded, Survey
from codescent.collectives.timing import BACKEND, OURS

TIMES = 1.5
"""Largest allowed ratio of medians."""
LIMIT_S, BUDGET_S = 120.0, 480.0
NOTES = """{size} in fp32 on {ranks} ranks with one thread each, gloo over loopback, {rounds} rounds in turns; a turn takes as long as
its slowest rank. {cores} cores. GB/s: what each rank sends, 2 (n - 1) / n times the bytes, over the median."""  # noqa: E501


def main() -> int:
    """Let both all-reduces take turns and print the table. Returns the exit code."""
    parsed = parser(__doc__.splitlines()[0])
    parsed.add_argument("--ranks", type=positive, default=4, help="number of ranks")
    parsed.add_argument("--size", type=size_bytes, default="16MiB", help="of the tensor")
    parsed.add_argument("--rounds", type=positive, default=31, help="after one for warming up")
    arguments = parsed.parse_args()
    if not 2 <= arguments.ranks <= MAX_RANKS:
        parsed.error(f"--ranks {arguments.ranks}: give 2 to {MAX_RANKS}: one rank sends nothing")
    record = hardware()
    say(machine_line(record))
    try:
        found = Survey(arguments.ranks, LIMIT_S).time(
            BackendSupport("gloo", "cpu"), arguments.size, arguments.rounds, BUDGET_S
        )
    except RanksEnded as ended:
        say("gloo: the ranks have ended")
        return ended.code
    result = evaluated(found, arguments.ranks, arguments.size)
    print(machine_line(record))
    print(NOTES.format(size=of_bytes(arguments.size), cores=available_cores(), **result))
    print("\n".join(["", *lines(result), "", *must_lines(result["musts"])]))
    write_json(
        arguments.json, {"hardware": record, **result, "hardware_after": {"load_average": hardware()["load_average"]}}
    )
    return 0


def evaluated(found: list[dict[str, Any]], ranks: int, size: int) -> dict[str, Any]:
    """The result as JSON data. `found` has what `timing.measure` returned on each rank."""
    seconds = found[0]["seconds"]
    medians = {name: statistics.median(seconds[name]) for name in (OURS, BACKEND)}
    same_bits = all(one["same_bits"][OURS] for one in found)
    difference = max(one["difference"] for one in found)
    return {
        "ranks": ranks,
        "size_bytes": size,
        "rounds": len(seconds[OURS]),
        "seconds": seconds,
        "median_s": medians,
        "ratio": medians[OURS] / medians[BACKEND],
        "same_bits_on_every_rank": same_bits,
        "difference": difference,
        "musts": [
            must("ours over gloo's all_reduce", medians[OURS] / medians[BACKEND], TIMES, at_least=False),
            must("ranks that have the bits of the rank before", sum(one["same_bits"][OURS] for one in found), ranks),
            must("largest difference of the two sums, over the largest sum", difference, 1e-6, at_least=False),
        ],
    }


def lines(result: dict[str, Any]) -> Iterator[str]:
    """The table."""
    sent_bytes = 2 * (result["ranks"] - 1) / result["ranks"] * result["size_bytes"]
    rows = []
    for name, words in ((OURS, "ours"), (BACKEND, "gloo's all_reduce")):
        median_s, best_s = result["median_s"][name], min(result["seconds"][name])
        ratio = median_s / result["median_s"][BACKEND]
        rows.append(
            [
                words,
                f"{1e3 * median_s:.1f}",
                f"{1e3 * best_s:.1f}",
                f"{sent_bytes / median_s / 1e9:.2f}",
                f"{ratio:.2f}",
            ]
        )
    yield table(["", "ms median", "best", "GB/s", "x gloo"], rows)


if __name__ == "__main__":
    finish(main)
