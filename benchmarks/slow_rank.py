"""In: methods, ranks that are equally fast, or one of them slow. Out: tokens/s beside those of the ranks alone.
Does not shape links (slow_network.py does). Skips, saying so, without root, namespaces or control groups."""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
from slow_methods import DDP, EVERY_STEP, SLOW_RANK_METHODS
from slow_runs import CHAR, SEQ_LEN, Case, Method, Recorded, Runner, whole_periods

SLOWER = 4.0
"""The last rank that trains has so many times less of a processor."""
END_STEPS = 4
"""Last steps that are not counted where a rank is slow: all ranks wait there for its last portion. A run of many steps
has its end once."""

ASYNCHRONOUS_SHARE = 0.9
"""Asynchronous methods reach this share of the tokens/s that the ranks reach alone together."""
ALONE, LEAST_STEPS = "alone", 12
PERIOD_ONE_COST = 0.03
"""Averaging in every step takes at most this fraction longer than DDP."""

NOTES = """The model of shakespeare_char_gpu, dropout 0, fp32, links not shaped. Each rank has a host (a network namespace).
whole cores: as many ranks as cores, at most four, {even} tokens per rank and step. one rank slow: four ranks, {uneven} tokens per
rank and step, {share:g} of a core for each rank, 1/{slower:g} of that for the last one, a whole core for a server; the last {end} steps are
not counted. Medians of {rounds} rounds, methods in turns. alone: as many ranks at the same time, each by itself, as fast."""  # noqa: E501


@dataclass(frozen=True)
class Setting:
    """What a table has in common.

    Attributes:
        name: of the table.
        methods: its rows.
        shares: of a core, for each rank that trains; 1: it is not limited.
        samples: of a rank in a step.
        steps: of a run of an asynchronous method, which does not wait for a slow rank. Others make half as many.
        end_steps: last steps that are not counted.
    """

    name: str
    methods: tuple[Method, ...]
    shares: tuple[float, ...]
    samples: int
    steps: int
    end_steps: int = 0

    @property
    def tokens(self) -> int:
        """Of a rank in a step."""
        return SEQ_LEN * self.samples

    def steps_of(self, method: Method) -> int:
        """Steps of a run: whole periods, one of which at least is counted."""
        wanted = self.steps // 2 if self.end_steps and method.repeatable else self.steps
        least = 2 * method.period + self.end_steps
        return -(-max(wanted, least) // method.period) * method.period


def settings_of(arguments: argparse.Namespace) -> list[Setting]:
    """The two tables."""
    chosen = [method for method in SLOW_RANK_METHODS if method.name in arguments.methods]
    ranks = min(4, len(os.sched_getaffinity(0)))
    slow = (*[arguments.share] * 3, arguments.share / SLOWER)
    even = Setting("whole cores", tuple(one for one in chosen if one in EVERY_STEP), (1.0,) * ranks, 8, 30)
    uneven = tuple(one for one in chosen if one.period > 1 or one not in EVERY_STEP or one is DDP)
    return [
        one for one in (even, Setting("one rank slow", uneven, slow, 16, arguments.steps, END_STEPS)) if one.methods
    ]


class Limits:
    """Gives each rank its share as soon as its run has recorded a step: starting up is not slowed.

    Args:
        of_ranks: the share of each rank; a rank without one, or with 1, has all its time.
    """

    def __init__(self, groups: shares.Shares, of_ranks: Sequence[float]) -> None:
        self._groups, self._shares = groups, of_ranks
        self._limited: set[int] = set()

    def __call__(self, started: Sequence[subprocess.Popen[str]], runs: Sequence[Path]) -> None:
        """See `Watch`."""
        for number, (process, run) in enumerate(zip(started, runs, strict=True)):
            limited = number < len(self._shares) and self._shares[number] < 1
            if limited and process.pid not in self._limited and _has_row(run / "metrics.csv"):
                self._limited.add(process.pid)
                if process.poll() is None:
                    self._groups.limit(process.pid, number, self._shares[number])


def _has_row(metrics: Path) -> bool:
    return metrics.exists() and metrics.read_bytes().count(b"\n") > 1


def tokens_per_s(recorded: Recorded, period: int, tokens: int, end_steps: int = 0) -> float:
    """Of all ranks: over the whole periods after the first one, in which the ranks got their shares."""
    counted = recorded.seconds[: len(recorded.seconds) - end_steps]
    return tokens / statistics.mean(whole_periods(counted, period))


def measured(arguments: argparse.Namespace, folder: Path, at: Setting) -> list[dict[str, Any]]:
    """A row for each method, then one of the ranks alone."""
    ranks, words = len(at.shares), (f"train.microbatch_size={at.samples}",)
    found: dict[str, list[float]] = {name: [] for name in (*(method.name for method in at.methods), ALONE)}
    with shares.Shares() as groups, hosts.Hosts(ranks + max(method.servers for method in at.methods)) as made:
        for turn in range(arguments.rounds):
            for method in at.methods if turn % 2 == 0 else reversed(at.methods):
                steps = at.steps_of(method)
                case = Case(CHAR, method, ranks, 1, steps, steps, round=turn)
                runner = Runner(folder, arguments.data, None, words, Limits(groups, at.shares), samples=at.samples)
                recorded = runner.run(case, made)
                found[method.name].append(tokens_per_s(recorded, method.period, at.tokens * ranks, at.end_steps))
                say(f"{at.name}, {method.name}: {found[method.name][-1]:,.0f} tokens/s, {recorded.wall_s:.0f} s")
            case = Case(CHAR, DDP, ranks, 1, at.steps // 3, at.steps // 3, round=turn)
            runner = Runner(folder, arguments.data, None, words, Limits(groups, at.shares), samples=at.samples)
            found[ALONE].append(sum(tokens_per_s(one, 1, at.tokens) for one in runner.alone(case, made)))
            say(f"{at.name}, {ALONE}: {found[ALONE][-1]:,.0f} tokens/s")
    bound = statistics.median(found[ALONE])
    return [
        {"method": name, "table": at.name, "rounds": values, "tokens_per_s": statistics.median(values),
         "of_alone": statistics.median(values) / bound}
        for name, values in found.items()
    ]  # fmt: skip


def musts_of(rows: Sequence[dict[str, Any]], end_steps: int) -> Iterator[dict[str, Any]]:
    """The requirements on a table: those on slow ranks where its last steps are not counted."""
    kinds = {method.name: method for method in SLOW_RANK_METHODS}
    for row in rows if end_steps else ():
        method = kinds.get(row["method"])
        if method is not None and not method.repeatable:
            claim = f"{method.name}, one rank {SLOWER:g} times slower: share of the tokens/s of the ranks alone"
            yield must(claim, row["of_alone"], ASYNCHRONOUS_SHARE)
    speeds = {row["method"]: row["tokens_per_s"] for row in rows}
    names = [method.name for method in EVERY_STEP]
    if not end_steps and set(names) <= speeds.keys():
        cost = speeds[names[0]] / speeds[names[1]] - 1
        yield must(f"{names[1]}, whole cores: time over DDP's", cost, PERIOD_ONE_COST, at_least=False)


def text_of(rows: Sequence[dict[str, Any]]) -> str:
    """A table."""
    cells = [[row["method"], f"{row['tokens_per_s']:,.0f}", f"{100 * row['of_alone']:.1f} %"] for row in rows]
    return table(("method", "tokens/s", "of alone"), cells)


def arguments_of() -> argparse.Namespace:
    """The command line. Exits with 2 for an argument that cannot be used."""
    names = [method.name for method in SLOW_RANK_METHODS]
    parsed = parser(__doc__.splitlines()[0])
    parsed.add_argument("--methods", nargs="+", default=names, metavar="NAME", choices=names, help="rows of the tables")
    parsed.add_argument("--share", type=float, default=0.4, help="of a core, for each rank where one is slow")
    parsed.add_argument("--steps", type=positive, default=24, help="of a run of an asynchronous method")
    parsed.add_argument("--rounds", type=positive, default=3, help="runs of each method")
    parsed.add_argument(
        "--data", type=Path, metavar="DIR", default=os.environ.get("CODESCENT_DATA_DIR"),
        help="folder with tinyshakespeare/input.txt; the default is CODESCENT_DATA_DIR",
    )  # fmt: skip
    arguments = parsed.parse_args()
    if not 0.05 <= arguments.share <= 1:
        parsed.error(f"--share {arguments.share:g}: give 0.05 to 1 of a core")
    if arguments.steps < LEAST_STEPS:
        parsed.error(f"--steps {arguments.steps}: give {LEAST_STEPS} or more: the first and the last are not counted")
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
    record, settings = hardware(), settings_of(arguments)
    tokens = {setting.end_steps: setting.tokens for setting in settings}
    notes = NOTES.format(
        even=tokens.get(0, "-"), uneven=tokens.get(END_STEPS, "-"), share=arguments.share, slower=SLOWER,
        end=END_STEPS, rounds=arguments.rounds,
    )  # fmt: skip
    print(machine_line(record), notes, sep="\n", flush=True)
    rows: list[dict[str, Any]] = []
    musts: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="codescent-slow-rank-") as made:
        folder = Path(made)
        try:
            Runner(folder, arguments.data, None).prepare()
            for setting in settings:
                found = measured(arguments, folder, setting)
                print("", setting.name, text_of(found), sep="\n", flush=True)
                rows += found
                musts += musts_of(found, setting.end_steps)
        except (SystemFailed, hosts.HostsFailed) as failure:
            say(str(failure))
            return 1
    print("", *must_lines(musts), sep="\n")
    write_json(arguments.json, {
        "benchmark": "slow_rank", "hardware": {**record, "load_average_after": hardware()["load_average"]},
        "share": arguments.share, "slower": SLOWER, "steps": arguments.steps, "rounds": arguments.rounds,
        "notes": notes.splitlines(), "rows": rows, "musts": musts,
    })  # fmt: skip
    return 0


if __name__ == "__main__":
    finish(main)
