"""In: nothing. Out: how often `codescent compare` shows a difference where there is none, and finds a planted one.
Does not test the arithmetic (tests/test_compare.py does). It writes a temporary folder."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measure import (
    ROOT,
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
from work import Work, write_tokens

sys.path.insert(0, str(ROOT))

import codescent.train.loop  # noqa: F401 (imported once, before the forks)
from codescent.base.counted import counted
from codescent.results import open_run
from codescent.results.compare import Times, times
from codescent.train.execute import Executor
from codescent.verbs.cli import run as run_codescent

WORK = Work(num_layers=4, num_heads=4, hidden_dim=64, vocab_size=65, max_seq_len=64, batch_size=8, seq_len=64)
BESIDE, TURNS = "beside", "turns"
"""The runs of a pair train at the same time, or one after the other."""

CONFIG = """# Written by a benchmark: no evaluation, no checkpoint, a row of ranks.csv every 5 steps.
[model]
num_layers = {work.num_layers}
num_heads = {work.num_heads}
hidden_dim = {work.hidden_dim}
vocab_size = {work.vocab_size}
seq_len = {work.max_seq_len}

[data]
corpus = "{tokens}"

[train]
global_batch_size = {work.batch_size}
eval_every = 0
num_threads = 1
matmul = "exact"
device = "cpu"

[checkpoint]
every = 0
last = false

[log]
every = 5
sample_tokens = 0
tensorboard = false
"""

METHODS = {
    "data": "_load",
    "forward": "_forward",
    "backward": "_backward",
    "communication": "_reduce",
    "optimizer": "_step",
}
"""For each part of a step the method of the executor in which a delay of this part is planted."""
PLANTED = tuple(METHODS)


@dataclass(frozen=True)
class Delay:
    """A sleep in each step of one rank. It takes no processor, so its length does not depend on the machine."""

    part: str
    rank: int
    seconds: float

    def plant(self) -> None:
        """Patch the executor of this process."""
        whole = getattr(Executor, METHODS[self.part])

        def slow(*arguments: Any, **named: Any) -> Any:
            result = whole(*arguments, **named)
            time.sleep(self.seconds)
            return result

        setattr(Executor, METHODS[self.part], slow)


@dataclass(frozen=True)
class Run:
    """A run to take: its folder, its number of ranks, and what is planted in it."""

    folder: Path
    ranks: int
    delay: Delay | None = None


def train(runs: Sequence[Run], folder: Path, options: argparse.Namespace) -> None:
    """`codescent train` for each of the runs, all at once, each rank a fork of this process.

    Raises SystemFailed: a rank did not succeed.
    """
    output = folder / "output.txt"
    output.write_text("")
    pids = []
    for one in runs:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        words = [str(folder / "job.toml"), f"train.num_steps={options.steps}", f"run.folder={one.folder}"]
        pids += [_fork(words, rank, one, port, output) for rank in range(one.ranks)]
    codes: list[int] = []
    try:
        for pid in pids:
            codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    finally:
        for pid in pids[len(codes) :]:  # this process is being stopped
            os.kill(pid, signal.SIGKILL)
    if any(codes):
        raise SystemFailed(f"codescent train ended with {codes}:\n{output.read_text()[-2000:]}")


def _fork(words: Sequence[str], rank: int, one: Run, port: int, output: Path) -> int:
    """Start one rank, with torchrun's environment."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        with output.open("a", encoding="utf-8") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        if one.ranks > 1:
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": one.ranks, "LOCAL_WORLD_SIZE": one.ranks}
            os.environ.update({name: str(value) for name, value in place.items()})
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        if one.delay is not None and one.delay.rank == rank:
            one.delay.plant()
        code = run_codescent(["train", *words])
    finally:
        sys.stdout.flush()
        os._exit(code)


def compared(name: str, way: str, ranks: int, delay: Delay | None, folder: Path, options: argparse.Namespace) -> Times:
    """Take the runs of A and of B, in which a delay is planted, and compare their times. The folders are deleted."""
    sides: tuple[list[Path], list[Path]] = ([], [])
    for number in range(options.planted_runs if delay else options.runs):
        couple = [Run(folder / f"{name}-a{number}", ranks), Run(folder / f"{name}-b{number}", ranks, delay)]
        for side, one in zip(sides, couple, strict=True):
            side.append(one.folder)
        order = couple if number % 2 == 0 else couple[::-1]  # what begins first may get the better core
        for together in [order] if way == BESIDE else [[one] for one in order]:
            train(together, folder, options)
    a, b = ([open_run(path) for path in side] for side in sides)
    found = times(a, b)
    for path in (*sides[0], *sides[1]):
        shutil.rmtree(path)
    return found


def entry_of(found: Times, way: str, ranks: int, delay: Delay | None) -> dict[str, Any]:
    """The result of a comparison, as numbers."""
    cause = found.cause
    return {
        "way": way, "ranks": ranks,
        "planted": None if delay is None else {"part": delay.part, "seconds": delay.seconds},
        "samples": f"{found.samples[0]} {found.way}{' side by side' if found.beside else ''}",
        "a_s": found.step.a_s, "b_s": found.step.b_s, "change": list(found.step.share), "step_shown": found.step.shown,
        "part": cause.part if cause is not None and cause.shown else None,
        "part_change": list(cause.share) if cause is not None else None,
        "load": os.getloadavg()[0],
    }  # fmt: skip


def measure(way: str, ranks: int, folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """All comparisons of one way and number of ranks: first those of equal runs, then those with a planted delay."""
    entries: list[dict[str, Any]] = []

    def add(number: int, delay: Delay | None) -> None:
        found = compared(f"{way}-{ranks}-{number}-{delay and delay.part}", way, ranks, delay, folder, options)
        entries.append(entry_of(found, way, ranks, delay))
        low, high = (f"{100 * end:+.1f}" for end in found.step.share[1:])
        what = f"planted {delay.part}" if delay else f"equal {number + 1}/{options.pairs}"
        say(f"{way}, {ranks} ranks, {what}: {low} to {high} %, {entries[-1]['part']}, load {entries[-1]['load']:.1f}")

    for number in range(options.pairs):
        add(number, None)
    for part in PLANTED:  # a share of the step of the comparison before: the load may have changed since the first one
        add(0, Delay(part, ranks - 1, options.share * entries[-1]["a_s"]))
    return entries


def names_it(entry: dict[str, Any]) -> bool:
    """Whether a planted delay was found, and its part named."""
    return bool(entry["part"] == f"{entry['planted']['part']}_s")


def musts_of(entries: Sequence[dict[str, Any]], way: str, ranks: int) -> list[dict[str, Any]]:
    """The requirements on one way and number of ranks."""
    mine = [entry for entry in entries if (entry["way"], entry["ranks"]) == (way, ranks)]
    equal = [entry for entry in mine if entry["planted"] is None]
    quiet = sum(not entry["step_shown"] and entry["part"] is None for entry in equal) / len(equal)
    named = sum(names_it(entry) for entry in mine if entry["planted"])
    where = f"{counted(ranks, 'rank')}, runs {'side by side' if way == BESIDE else 'in turns'}"
    return [
        must(f"{where}: share of {len(equal)} comparisons of equal runs that show no difference", quiet, 0.9),
        must(f"{where}: planted delays whose part is named, of {len(PLANTED)}", named, len(PLANTED)),
    ]


def arguments_of() -> argparse.Namespace:
    """The command line."""
    parsed = parser("Compare runs of one config, and runs with a planted delay, as `codescent compare` does.")
    parsed.add_argument("--pairs", type=positive, default=20, help="comparisons of equal runs")
    parsed.add_argument("--runs", type=positive, default=5, help="runs of each side of a comparison of equal runs")
    parsed.add_argument("--planted-runs", type=positive, default=5, help="the same where a delay is planted")
    parsed.add_argument("--steps", type=positive, default=120, help="steps of a run")
    parsed.add_argument("--ranks", default="1,2", help="numbers of ranks, with commas")
    parsed.add_argument("--ways", default=BESIDE, help=f"{BESIDE} (side by side), {TURNS} (in turns)")
    parsed.add_argument("--share", type=float, default=0.1, help="planted delay, as a share of the step")
    arguments = parsed.parse_args()
    ways, ranks = arguments.ways.split(","), arguments.ranks.split(",")
    if wrong := [way for way in ways if way not in (BESIDE, TURNS)]:
        parsed.error(f"--ways: no {', '.join(wrong)}; give {BESIDE}, {TURNS} or both")
    if wrong := [number for number in ranks if not number.isdecimal() or int(number) < 1]:
        parsed.error(f"--ranks: {', '.join(wrong)}: give whole numbers of at least 1")
    arguments.cases = [(way, int(number)) for way in ways for number in ranks]
    return arguments


def main() -> int:
    """Measure and print. Returns 1 if a run failed, else 0."""
    options, record = arguments_of(), hardware()
    os.environ["OMP_NUM_THREADS"] = "1"
    entries: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="codescent-compare-") as name:
        folder = Path(name)
        (folder / "job.toml").write_text(CONFIG.format(work=WORK, tokens=write_tokens(folder, WORK.vocab_size).parent))
        try:
            for case in options.cases:
                way, ranks = case
                entries += measure(way, ranks, folder, options)
        except SystemFailed as failure:
            say(str(failure))
            return 1
    claims = [claim for case in options.cases for claim in musts_of(entries, *case)]
    header = ["comparison", "step ms", "change %", "interval", "part named", "load"]
    lines = [
        [
            f"{entry['way']}, {entry['ranks']} ranks" + (f", {entry['planted']['part']}" if entry["planted"] else ""),
            f"{1e3 * entry['a_s']:.1f}",
            f"{100 * entry['change'][0]:+.1f}",
            f"{100 * entry['change'][1]:+.1f} to {100 * entry['change'][2]:+.1f}",
            entry["part"] or "-",
            f"{entry['load']:.1f}",
        ]
        for entry in entries
    ]
    print(machine_line(record), "", table(header, lines), "", *must_lines(claims), sep="\n")
    result = {
        "benchmark": "compare_runs", "hardware": {**record, "load_average_after": hardware()["load_average"]},
        "runs": options.runs, "planted_runs": options.planted_runs, "steps": options.steps,
        "planted_share": options.share, "comparisons": entries, "musts": claims,
    }  # fmt: skip
    write_json(options.json, result)
    return 0


if __name__ == "__main__":
    finish(main)
