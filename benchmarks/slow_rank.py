"""In: methods, a rank that has a quarter of the others' processor. Out: tokens/s beside those of the ranks alone.
Does not shape links (slow_network.py does). Skips, saying so, without root, namespaces or control groups."""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import hosts
import shares
from measure import (
    SystemFailed,
    finish,
    hardware,
    machine_line,
    must,
    must_lines,
    parser,
    positive,
    say,
    table,
    write_json,
)
from slow_methods import DDP, SLOW_RANK_METHODS
from slow_runs import CHAR, SEQ_LEN, Case, Recorded, Runner, whole_periods

HOSTS = 4
SLOWER = 4.0
"""The last rank that trains has so many times less of a processor."""
SAMPLES = 8
"""Samples of a rank and step: its arithmetic is long beside a push, as in a real run on a fast network."""

ASYNCHRONOUS_SHARE = 0.9
"""Asynchronous methods reach this share of the tokens/s that the ranks reach alone together."""
PERIOD_ONE_COST = 0.03
"""On equal ranks averaging in every step takes at most this fraction longer than DDP."""

NOTES = """The model of shakespeare_char_gpu, dropout 0, fp32, {tokens} tokens per rank and step, links not shaped. Each rank has a
host (a network namespace) and {share:g} of a core; in the second table the last one has 1/{slower:g} of that. A server has a whole core.
Medians of {rounds} rounds, methods in turns. alone: as many ranks at the same time, each by itself, with the same shares."""  # noqa: E501


class Limits:
    """Gives each rank its share as soon as its run has recorded a step: starting up is not slowed.

    Args:
        shares: of each rank; a rank without one has all its time.
    """

    def __init__(self, groups: shares.Shares, of_ranks: Sequence[float]) -> None:
        self._groups, self._shares = groups, of_ranks
        self._limited: set[int] = set()

    def __call__(self, started: Sequence[subprocess.Popen[str]], runs: Sequence[Path]) -> None:
        """See `Watch`."""
        for number, (process, run) in enumerate(zip(started, runs, strict=True)):
            if number < len(self._shares) and process.pid not in self._limited and _has_row(run / "metrics.csv"):
                self._limited.add(process.pid)
                if process.poll() is None:
                    self._groups.limit(process.pid, number, self._shares[number])


def _has_row(metrics: Path) -> bool:
    return metrics.exists() and metrics.read_bytes().count(b"\n") > 1


def tokens_per_s(recorded: Recorded, period: int, tokens: int) -> float:
    """Of all ranks: over the whole periods after the first one, in which the ranks got their shares."""
    return tokens / statistics.mean(whole_periods(recorded.seconds, period))


def measured(arguments: argparse.Namespace, folder: Path, slow: bool) -> list[dict[str, Any]]:
    """A row for each method, then one of the ranks alone."""
    methods = [method for method in SLOW_RANK_METHODS if method.name in arguments.methods]
    of_ranks = [arguments.share] * HOSTS
    if slow:
        of_ranks[-1] /= SLOWER
    tokens = SEQ_LEN * SAMPLES
    words = (f"train.microbatch_size={SAMPLES}",)
    found: dict[str, list[float]] = {method.name: [] for method in methods} | {"alone": []}
    with shares.Shares() as groups, hosts.Hosts(HOSTS + max(method.servers for method in methods)) as made:
        for turn in range(arguments.rounds):
            for method in methods if turn % 2 == 0 else reversed(methods):
                steps = max(arguments.steps // method.period, 2) * method.period
                case = Case(CHAR, method, HOSTS, 1, steps, steps, round=turn)
                runner = Runner(folder, arguments.data, None, words, Limits(groups, of_ranks), samples=SAMPLES)
                recorded = runner.run(case, made)
                found[method.name].append(tokens_per_s(recorded, method.period, tokens * HOSTS))
                say(f"{method.name}: {found[method.name][-1]:,.0f} tokens/s, {recorded.wall_s:.0f} s")
            case = Case(CHAR, DDP, HOSTS, 1, arguments.steps, arguments.steps, round=turn)
            runner = Runner(folder, arguments.data, None, words, Limits(groups, of_ranks), samples=SAMPLES)
            alone = runner.alone(case, made)
            found["alone"].append(sum(tokens_per_s(one, 1, tokens) for one in alone))
            say(f"alone: {found['alone'][-1]:,.0f} tokens/s")
    bound = statistics.median(found["alone"])
    return [
        {"method": name, "slow": slow, "rounds": values, "tokens_per_s": statistics.median(values),
         "of_alone": statistics.median(values) / bound}
        for name, values in found.items()
    ]  # fmt: skip


def musts_of(equal: Sequence[dict[str, Any]], slow: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The requirements on both tables."""
    kinds = {method.name: method for method in SLOW_RANK_METHODS}
    for row in slow:
        method = kinds.get(row["method"])
        if method is not None and not method.repeatable:
            claim = f"{method.name}, one rank {SLOWER:g} times slower: share of the tokens/s of the ranks alone"
            yield must(claim, row["of_alone"], ASYNCHRONOUS_SHARE)
    speeds = {row["method"]: row["tokens_per_s"] for row in equal}
    if {"ddp", "mean every 1"} <= speeds.keys():
        cost = speeds["ddp"] / speeds["mean every 1"] - 1
        yield must("mean every 1, equal ranks: time over DDP's", cost, PERIOD_ONE_COST, at_least=False)


def text_of(rows: Sequence[dict[str, Any]]) -> str:
    """A table."""
    cells = [[row["method"], f"{row['tokens_per_s']:,.0f}", f"{100 * row['of_alone']:.1f} %"] for row in rows]
    return table(("method", "tokens/s", "of alone"), cells)


def arguments_of() -> argparse.Namespace:
    """The command line. Exits with 2 for an argument that cannot be used."""
    names = [method.name for method in SLOW_RANK_METHODS]
    parsed = parser(__doc__.splitlines()[0])
    parsed.add_argument("--methods", nargs="+", default=names, metavar="NAME", choices=names, help="rows of the table")
    parsed.add_argument("--share", type=float, default=0.4, help="of a core, for each rank")
    parsed.add_argument("--steps", type=positive, default=12, help="of a run; whole periods, two at least")
    parsed.add_argument("--rounds", type=positive, default=3, help="runs of each method")
    parsed.add_argument(
        "--data", type=Path, metavar="DIR", default=os.environ.get("CODESCENT_DATA_DIR"),
        help="folder with tinyshakespeare/input.txt; the default is CODESCENT_DATA_DIR",
    )  # fmt: skip
    arguments = parsed.parse_args()
    if not 0.05 <= arguments.share <= 1:
        parsed.error(f"--share {arguments.share:g}: give 0.05 to 1 of a core")
    if arguments.steps < 3:
        parsed.error(f"--steps {arguments.steps}: give 3 or more: the first one is not measured")
    if arguments.data is None or not (arguments.data / "tinyshakespeare" / "input.txt").is_file():
        parsed.error(f"no tinyshakespeare/input.txt in {arguments.data}: give --data or set CODESCENT_DATA_DIR")
    return arguments


def main() -> int:
    """Measure and print. Returns the exit code."""
    arguments = arguments_of()
    reason = hosts.missing() or shares.missing()
    if reason:
        print(f"skipped: {reason}")
        return 0
    record = hardware()
    notes = NOTES.format(tokens=SEQ_LEN * SAMPLES, share=arguments.share, slower=SLOWER, rounds=arguments.rounds)
    print(machine_line(record), notes, sep="\n", flush=True)
    with tempfile.TemporaryDirectory(prefix="codescent-slow-rank-") as made:
        folder = Path(made)
        try:
            Runner(folder, arguments.data, None).prepare()
            equal = measured(arguments, folder, slow=False)
            print("", "equal ranks", text_of(equal), sep="\n", flush=True)
            slow = measured(arguments, folder, slow=True)
        except (SystemFailed, hosts.HostsFailed) as failure:
            say(str(failure))
            return 1
    musts = list(musts_of(equal, slow))
    print("", f"the last rank {SLOWER:g} times slower", text_of(slow), "", *must_lines(musts), sep="\n")
    write_json(arguments.json, {
        "benchmark": "slow_rank", "hardware": {**record, "load_average_after": hardware()["load_average"]},
        "share": arguments.share, "slower": SLOWER, "steps": arguments.steps, "rounds": arguments.rounds,
        "notes": notes.splitlines(), "rows": [*equal, *slow], "musts": musts,
    })  # fmt: skip
    return 0


if __name__ == "__main__":
    finish(main)
