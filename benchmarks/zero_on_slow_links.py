"""In: a rate, layouts that send by reduce-scatters. Out: seconds of their training steps beside those of all-reduces.
Does not time a collective alone (reduce_scatter.py does). Skips, saying so, without root or namespaces."""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hosts import CONGESTION, Hosts, HostsFailed, missing
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
from slow_link import Calibrated, calibrate
from slow_methods import DDP
from slow_runs import CHAR, SEQ_LEN, Case, Method, Runner, whole_periods

from codescent.clusters.by_links import of_links
from codescent.clusters.link import Link
from codescent.cost.arithmetic import arithmetic
from codescent.cost.ranks_walk import walk

MODEL = ("model.num_layers=2", "model.hidden_dim=128", "model.num_heads=4", f"model.seq_len={SEQ_LEN}")
"""A step of DDP takes 3.4 s at 4 Mbit/s."""
RANKS = 2
MOST = 1.05
"""Most that a step with reduce-scatters takes of that of as many bytes in all-reduces."""

SHARDS = "parallel.dp_shard={ranks}"
TP = Method("tp", ("parallel.tp={ranks}", "parallel.sequence_parallel=false"))
ZERO1 = Method("zero1", (SHARDS, "parallel.zero_stage=1"))
SEQUENCE = Method("tp with sequence_parallel", ("parallel.tp={ranks}", "parallel.sequence_parallel=true"))
ZERO3 = Method("zero3", (SHARDS, "parallel.zero_stage=3"))
BESIDE = {DDP: DDP, ZERO1: DDP, ZERO3: DDP, TP: TP, SEQUENCE: TP}
"""Each layout, and the one without reduce-scatters that it is compared with."""

NOTES = """{ranks} ranks, each on a host of its own (a network namespace); payload {payload:.2f} Mbit/s, congestion control {congestion}.
fp32, dropout 0, {tokens} tokens per rank and step. Each run: {steps} steps, of which the first is not counted. Medians of {rounds} rounds,
layouts in turns. times: over that of the layout named, in the same round. plan: by `walk`, as in codescent plan --link."""  # noqa: E501


@dataclass(frozen=True)
class Row:
    """Seconds of a step of a layout: one median for each round, and what the plan predicts."""

    method: Method
    seconds: list[float]
    declared_bytes: float
    planned_s: float

    def times(self, other: Row) -> float:
        """How many times as long as a step of another layout: the median over rounds."""
        return statistics.median(mine / its for mine, its in zip(self.seconds, other.seconds, strict=True))

    def to_json(self, other: Row) -> dict[str, Any]:
        """The fields, and the ratios to another layout."""
        return {
            "layout": self.method.name, "step_s": self.seconds, "median_s": statistics.median(self.seconds),
            "planned_s": self.planned_s, "declared_bytes": self.declared_bytes, "beside": other.method.name,
            "times": self.times(other), "planned_times": self.planned_s / other.planned_s,
        }  # fmt: skip


def measured(arguments: argparse.Namespace, folder: Path) -> tuple[dict[Method, Row], dict[str, Any]]:
    """A row for each layout, and the link as it was measured."""
    runner = Runner(folder, arguments.data, None, MODEL)
    runner.prepare()
    seconds: dict[Method, list[float]] = {method: [] for method in BESIDE}
    declared: dict[Method, float] = {}
    alone: list[float] = []
    with Hosts(RANKS) as hosts:
        link = _link(arguments, hosts, folder)
        for turn in range(arguments.rounds):
            for method in BESIDE if turn % 2 == 0 else reversed(BESIDE):
                recorded = runner.run(_case(method, arguments, turn), hosts)
                seconds[method].append(statistics.median(whole_periods(recorded.seconds, 1)))
                declared[method] = recorded.declared_bytes
                say(f"{method.name}: {seconds[method][-1]:.3f} s a step, {recorded.wall_s:.0f} s in all")
            ranks = runner.alone(_case(DDP, arguments, turn), hosts)
            alone += [statistics.median(whole_periods(one.seconds, 1)) for one in ranks]
    compute_s, of_link = statistics.median(alone), of_links(Link(link.payload_mbit * 1e6 / 8))
    rows = {}
    for method in BESIDE:
        plan = runner.plan(_case(method, arguments, 0))
        planned_s = walk(plan, arithmetic(plan, compute_s), of_link, timeline=False).step_s
        rows[method] = Row(method, seconds[method], declared[method], planned_s)
    return rows, {**link.to_json(), "compute_s": compute_s}


def _link(arguments: argparse.Namespace, hosts: Hosts, folder: Path) -> Calibrated:
    """Shape the links: at 4 Mbit/s a calibration takes minutes."""
    if arguments.shaper is None:
        return calibrate(hosts, arguments.rate, folder)
    hosts.shape(arguments.shaper)
    return Calibrated(arguments.rate, arguments.rate, arguments.shaper)


def _case(method: Method, arguments: argparse.Namespace, turn: int) -> Case:
    return Case(CHAR, method, RANKS, 1, arguments.steps, arguments.steps, mbit=arguments.rate, round=turn)


def musts_of(rows: dict[Method, Row]) -> Iterator[dict[str, Any]]:
    """The requirements: a step takes as many times as long as it sends times the bytes."""
    for method in (ZERO1, ZERO3, SEQUENCE):
        row, other = rows[method], rows[BESIDE[method]]
        bytes_over = row.declared_bytes / other.declared_bytes
        claim = (
            f"{method.name}: step over {other.method.name}'s, divided by the bytes over its bytes ({bytes_over:.2f})"
        )
        yield must(claim, row.times(other) / bytes_over, MOST, at_least=False)


def text_of(rows: Sequence[dict[str, Any]]) -> str:
    """The table."""
    cells = [
        [row["layout"], f"{row['declared_bytes'] / 1e6:.2f}", f"{row['median_s']:.2f}", f"{row['planned_s']:.2f}",
         f"{row['times']:.3f} of {row['beside']}", f"{row['planned_times']:.3f}"]
        for row in rows
    ]  # fmt: skip
    return table(("layout", "MB sent", "step, s", "plan, s", "times", "times by the plan"), cells)


def arguments_of() -> argparse.Namespace:
    """The command line. Exits with 2 for an argument that cannot be used."""
    parsed = parser(__doc__.splitlines()[0])
    parsed.add_argument("--rate", type=float, default=4.0, metavar="MBIT", help="payload of a link, million bits/s")
    parsed.add_argument(
        "--shaper", type=float, metavar="MBIT", help="rate with headers that has this payload: it is not calibrated"
    )
    parsed.add_argument("--rounds", type=positive, default=3, help="runs of each layout")
    parsed.add_argument("--steps", type=positive, default=5, help="of a run; the first is not counted")
    parsed.add_argument(
        "--data", type=Path, metavar="DIR", default=os.environ.get("CODESCENT_DATA_DIR"),
        help="folder with tinyshakespeare/input.txt; the default is CODESCENT_DATA_DIR",
    )  # fmt: skip
    arguments = parsed.parse_args()
    for name in ("rate", "shaper"):
        given = getattr(arguments, name)
        if given is not None and not 0.1 <= given <= 10_000:
            parsed.error(f"--{name} {given:g}: give 0.1 to 10,000 Mbit/s")
    if arguments.steps < 2:
        parsed.error(f"--steps {arguments.steps}: give 2 or more: the first is not counted")
    if arguments.data is None or not (arguments.data / "tinyshakespeare" / "input.txt").is_file():
        parsed.error(f"no tinyshakespeare/input.txt in {arguments.data}: give --data or set CODESCENT_DATA_DIR")
    return arguments


def main() -> int:
    """Measure and print. Returns the exit code."""
    arguments = arguments_of()
    if reason := missing():
        say(f"skipped: {reason}")
        return 0
    record = hardware()
    print(machine_line(record), flush=True)
    with tempfile.TemporaryDirectory(prefix="codescent-zero-") as made:
        try:
            found, link = measured(arguments, Path(made))
        except (SystemFailed, HostsFailed) as failure:
            say(str(failure))
            return 1
    rows = [row.to_json(found[BESIDE[method]]) for method, row in found.items()]
    musts = list(musts_of(found))
    notes = NOTES.format(
        ranks=RANKS, payload=link["payload_mbit"], congestion=CONGESTION, tokens=SEQ_LEN, steps=arguments.steps,
        rounds=arguments.rounds,
    )  # fmt: skip
    print(notes, "", text_of(rows), "", *must_lines(musts), sep="\n")
    write_json(arguments.json, {
        "benchmark": "zero_on_slow_links", "hardware": {**record, "load_average_after": hardware()["load_average"]},
        "link": link, "steps": arguments.steps, "rounds": arguments.rounds, "notes": notes.splitlines(),
        "rows": rows, "musts": musts,
    })  # fmt: skip
    return 0


if __name__ == "__main__":
    finish(main)
