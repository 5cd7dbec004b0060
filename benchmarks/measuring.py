"""In: nothing. Out: what measuring where the time of a step goes costs, as a share of the step, for several layouts.
Does not test that the parts are right (tests/test_ranks_csv.py does). It writes a temporary folder."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from measure import ROOT, finish, hardware, machine_line, must, must_lines, parser, positive, say, table, write_json
from work import SMALL, environment, write_tokens

sys.path.insert(0, str(ROOT))

from codescent.base.progress import BEAT_EVERY_S, ENDED, READING, OwnPage, Pages, shared_memory
from codescent.base.ranges import Flight, know_groups
from codescent.base.stopwatch import Laps, Stopwatch, waiting
from codescent.build import build
from codescent.config.sections import Config
from codescent.data.text.dataset import open_dataset
from codescent.launch.environment import read
from codescent.launch.local import LOOK_EVERY_S, run_ranks
from codescent.launch.supervisor import Supervisor
from codescent.record import ranks
from codescent.results import bootstrap
from codescent.train.assemble import assemble
from codescent.train.memory import peak_memory_bytes
from codescent.train.ranks import RankTimes
from codescent.train.result import WAIT_COLUMN, StepResult
from codescent.train.stop import StopRequest
from codescent.train.trainer import Trainer
from codescent.train.world import World

CASES: dict[str, tuple[int, dict[str, Any], int]] = {
    "1 rank": (1, {}, 4),
    "dp_replicate=2": (2, {}, 4),
    "dp_shard=2": (2, {"dp_shard": 2}, 4),
    "tp=2": (2, {"tp": 2}, 4),
    "pp=2": (2, {"pp": 2}, 4),
    "tp=2, 12 layers": (2, {"tp": 2}, 12),
}
"""Ranks, keys of [parallel] and number of layers of each case. Twelve layers are those of GPT-2 124M."""

EVERY = 10
"""Steps of a turn, and the default of log.every: each turn with measuring gathers and writes one row a rank."""

MOST = 0.01
"""Largest cost that is asked for, as a share of the step."""

MOST_PAGE = 0.001
"""Largest cost that is asked for of writing a rank's page (base/progress.py), as a share of the step."""

MOST_WATCH = 0.005
"""Largest cost that is asked for of all that finds ranks that stand still: pages, heartbeats, the launcher."""

NOTE = """with: medians of {turns} pairs of turns of {steps} steps, more than without measuring. CPU: processor seconds of all ranks.
counted: all calls of the stopwatch in a step, without the step, on the rank with the most. page: the same of its page.
watch: heartbeats of a rank and looks of its launcher, as a share of one processor for each rank.
"""  # noqa: E501

JOB = "CODESCENT_BENCHMARK_JOB"
"""Environment variable with the path of the job's file. If it is set, this process is a rank of the job."""


class Silent(Stopwatch):
    """A stopwatch that measures nothing: what a step would be without it."""

    def start(self, part: str) -> None:
        """Nothing. `Stopwatch.running` stays None, so that `waiting` does nothing either."""

    def lap(self, part: str) -> None:
        """Nothing."""

    def stop(self) -> Laps:
        """No part."""
        return Laps([], events=False)


class Unwatched:
    """In place of the executor's MemoryWatch: it looks at nothing."""

    def step(self, number: int) -> AbstractContextManager[None]:
        """See MemoryWatch."""
        return nullcontext()

    def after(self, index: int) -> None:
        """See MemoryWatch."""


class Counting(Stopwatch):
    """Counts its calls in a step."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, WAIT_COLUMN)
        self.all = self.waits_seen = 0

    def lap(self, part: str) -> None:
        """See Stopwatch."""
        self.all += 1
        super().lap(part)

    def pause(self) -> None:
        """See Stopwatch."""
        self.waits_seen += 1
        super().pause()


class CountingPage(OwnPage):
    """Counts what is written in a step."""

    def __init__(self, pages: Pages, rank: int) -> None:
        super().__init__(pages, rank)
        self.positions = self.begun = self.entered = 0

    def at(self, position: float, stage: int = 0, instruction: str = "") -> None:
        """See OwnPage."""
        self.positions += 1
        super().at(position, stage, instruction)

    def enter(self, section: str) -> str:
        """See OwnPage."""
        self.entered += 1
        return super().enter(section)

    def collective(self, row: int, kind: bytes, size_bytes: int = 0) -> None:
        """See OwnPage."""
        self.begun += 1
        super().collective(row, kind, size_bytes)


class Turns:
    """Steps of one trainer, with measuring (times and memory) and without."""

    def __init__(self, trainer: Trainer, folder: Path, world: World) -> None:
        self.trainer, self.folder, self.world, self.number = trainer, folder, world, 0
        self.measuring, self.silent = trainer.executor.watch, Silent(world.device, WAIT_COLUMN)
        self.memory, self.unwatched = trainer.executor.memory, Unwatched()
        self.times = RankTimes()

    def take(self, *, measured: bool) -> tuple[float, float]:
        """Mean wall and processor seconds of a step over a turn."""
        executor = self.trainer.executor
        executor.watch = self.measuring if measured else self.silent
        executor.memory = self.memory if measured else cast(Any, self.unwatched)
        executor.instruments.watch, executor.instruments.memory = executor.watch, executor.memory
        self.world.all_agree(True)  # a barrier: all ranks begin together
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        for _ in range(EVERY):
            result = executor.step(self.number, 1e-4)
            self.number += 1
            if measured:
                self.times.add(result.step_s, result.parts)
        if measured:
            self._gather()
        return (time.perf_counter() - wall_s) / EVERY, (time.process_time() - cpu_s) / EVERY

    def _gather(self) -> None:
        rows, _ = self.times.gather(self.number, peak_memory_bytes(self.world.device), self.memory.numbers())
        if rows:
            ranks.write(self.folder, rows)

    def calls(self) -> dict[str, int]:
        """Laps, waits, positions and collectives of a step."""
        assert self.world.pages is not None, "our launcher has started this rank"
        counting = self.trainer.executor.watch = Counting(self.world.device)
        self.trainer.executor.instruments.watch = counting
        before, page = OwnPage.current, CountingPage(self.world.pages, self.world.this_rank.rank)
        OwnPage.current = page
        know_groups([*self.world.groups.values()])
        self.trainer.executor.step(self.number, 1e-4)
        OwnPage.current = before
        self.number += 1
        laps = counting.all - 2 * counting.waits_seen
        written = {"positions": page.positions, "collectives": page.begun, "sections": page.entered}
        return {"laps": laps, "waits": counting.waits_seen, **written}


def cost_s(act: Callable[[], object], times: int = 500) -> float:
    """Processor seconds of a call: the smallest of several means, which other programs disturb least."""
    means = []
    for _ in range(20):
        begun = time.process_time()
        for _ in range(times):
            act()
        means.append((time.process_time() - begun) / times)
    return min(means)


def counted_s(device: torch.device, laps: int, waits: int) -> float:
    """Processor seconds of all that measuring does in a step with so many laps and waits, without the step."""
    watch, times = Stopwatch(device, WAIT_COLUMN), RankTimes()

    def measure() -> None:
        watch.start("forward_s")
        for _ in range(laps - 1):
            watch.lap("forward_s")
        for _ in range(waits):
            with waiting():
                pass
        times.add(1.0, StepResult(0.0, 0.0, False, watch.stop().read(), 1.0).parts)

    return cost_s(measure)


def page_s(positions: int, collectives: int, sections: int) -> float:
    """Processor seconds of so many writes of a rank's page in a step."""
    page = OwnPage.current
    assert page is not None, "our launcher has started this rank"
    position_s = cost_s(lambda: page.at(1.5, 0, "backward"))
    section_s = cost_s(lambda: page.enter(READING if page.section == "" else ""))
    return positions * position_s + sections * section_s + collectives * cost_s(lambda: Flight("all_reduce", None))


def beat_share() -> float:
    """Processor seconds per second of the heartbeats of a rank."""
    descriptor = shared_memory(1)
    pages = Pages(descriptor, 1)
    os.close(descriptor)
    return cost_s(OwnPage(pages, 0).beat) / BEAT_EVERY_S


def look_share(ranks: int) -> float:
    """Processor seconds per second and rank of the launcher, which looks whether the ranks move."""
    descriptor = shared_memory(ranks)
    pages = Pages(descriptor, ranks)
    os.close(descriptor)
    supervisor, running = Supervisor(pages, ranks), dict.fromkeys(range(ranks), os.getpid())
    look_s = cost_s(lambda: supervisor.look(running), 50)
    return look_s / LOOK_EVERY_S / ranks


def rank_main(path: Path) -> None:
    """Run one rank: turns with and without measuring, after a warm-up of both. Every rank writes its seconds."""
    job = json.loads(path.read_text(encoding="utf-8"))
    this_rank = read(os.environ)
    assert this_rank is not None
    world, dataset = World(this_rank, "cpu", 1, 600.0), open_dataset(Path(job["tokens"]))
    config = Config(**job["sections"])
    plan = build(config, dataset.vocab_size, this_rank.world_size)
    world.divide(plan)
    with StopRequest(alone=False) as stop:
        trainer = assemble(config, plan, world, dataset, 0, stop)
        turns = Turns(trainer, path.parent, world)
        taken: dict[str, list[tuple[float, float]]] = {"with": [], "without": []}
        for number in range(job["turns"] + 1):
            for measured in (True, False) if number % 2 == 0 else (False, True):  # the order is reversed
                found = turns.take(measured=measured)
                if number:
                    taken["with" if measured else "without"].append(found)
        calls = turns.calls()
        trainer.close()
    own = {
        "counted_s": counted_s(world.device, calls["laps"], calls["waits"]),
        "page_s": page_s(calls["positions"], calls["collectives"], calls["sections"]),
    }
    report = {**taken, **calls, **own}
    path.with_name(f"rank-{this_rank.rank}.json").write_text(json.dumps(report), encoding="utf-8")
    world.at(ENDED)
    world.close()


def entry_of(name: str, arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run one case on new ranks. Raises SystemExit if a rank fails; the rank has printed why."""
    number, parallel, layers = CASES[name]
    tokens = str(write_tokens(folder, SMALL.vocab_size).parent)
    train = {"global_batch_size": SMALL.batch_size, "device": "cpu"}
    sections = {
        "model": {
            "num_layers": layers, "num_heads": SMALL.num_heads, "hidden_dim": SMALL.hidden_dim,
            "vocab_size": SMALL.vocab_size, "seq_len": SMALL.max_seq_len,
        },
        "data": {"corpus": tokens, "seq_len": SMALL.seq_len},
        "train": {**train, "microbatch_size": SMALL.batch_size // 4} if "pp" in parallel else train,
        "parallel": parallel,
    }  # fmt: skip
    path = folder / "job.json"
    path.write_text(json.dumps({"sections": sections, "tokens": tokens, "turns": arguments.turns}), encoding="utf-8")
    if run_ranks([sys.executable, __file__], number, {**environment(), JOB: str(path)}) != 0:
        sys.exit(1)
    found = [json.loads((folder / f"rank-{rank}.json").read_text(encoding="utf-8")) for rank in range(number)]
    return {
        "case": name,
        "ranks": number,
        "parallel": parallel,
        "layers": layers,
        **evaluated(found),
        "beat_share": (beats := beat_share()),
        "watch_share": beats + look_share(number),
    }


def evaluated(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The seconds of all ranks as shares of the step: what the turns show, and what the counted calls cost."""
    entry: dict[str, Any] = {}
    for column, clock in enumerate(("wall", "cpu")):
        on, off = (
            np.array([[turn[column] for turn in rank[which]] for rank in found]) for which in ("with", "without")
        )
        shares = on.sum(axis=0) / off.sum(axis=0) - 1  # over the ranks: one number for each pair of turns
        entry[f"{clock}_s"] = float(np.median(off.mean(axis=0)))
        entry[f"{clock}_share"], *entry[f"{clock}_interval"] = bootstrap(shares)
    most = max(found, key=lambda rank: rank["counted_s"])
    entry |= {name: most[name] for name in ("laps", "waits", "positions", "collectives", "counted_s", "page_s")}
    step_s = statistics.median(turn[1] for turn in most["without"])
    entry |= {"counted_share": most["counted_s"] / step_s, "page_share": most["page_s"] / step_s}
    return {**entry, "seconds": [{which: rank[which] for which in ("with", "without")} for rank in found]}


def arguments_of() -> argparse.Namespace:
    """The command line."""
    parsed = parser("Time steps with the stopwatch and the rows of ranks.csv, and steps without, in turns.")
    parsed.add_argument("--turns", type=positive, default=40, help=f"turns of {EVERY} steps with, and as many without")
    parsed.add_argument("--cases", default=";".join(CASES), help="cases to run, with semicolons")
    arguments = parsed.parse_args()
    arguments.cases = [name.strip() for name in arguments.cases.split(";")]
    if unknown := [name for name in arguments.cases if name not in CASES]:
        parsed.error(f"--cases: no {', '.join(unknown)}; the cases are {'; '.join(CASES)}")
    return arguments


def main() -> int:
    """Measure and print."""
    arguments, record = arguments_of(), hardware()
    entries = []
    for name in arguments.cases:
        with tempfile.TemporaryDirectory(prefix="codescent-measuring-") as folder:
            entries.append(entry_of(name, arguments, Path(folder)))
        shares = [entries[-1][name] for name in ("cpu_share", "counted_share")]
        say(f"{name}: {shares[0]:+.2%} of the processor seconds, counted {shares[1]:.2%}")
    columns = [
        "case",
        "CPU ms step",
        "with, CPU",
        "interval",
        "with, wall",
        "laps",
        "waits",
        "counted us",
        "counted",
        "page",
        "watch",
    ]
    rows = [
        [
            entry["case"],
            f"{1e3 * entry['cpu_s']:.1f}",
            f"{entry['cpu_share']:+.2%}",
            f"{entry['cpu_interval'][0]:+.2%} to {entry['cpu_interval'][1]:+.2%}",
            f"{entry['wall_share']:+.2%}",
            f"{entry['laps']}",
            f"{entry['waits']}",
            f"{1e6 * entry['counted_s']:.0f}",
            f"{entry['counted_share']:.2%}",
            f"{entry['page_share']:.3%}",
            f"{entry['watch_share']:.3%}",
        ]
        for entry in entries
    ]
    print(machine_line(record), NOTE.format(turns=arguments.turns, steps=EVERY), table(columns, rows), "", sep="\n")
    claims = [
        must("cost of measuring in processor seconds, share of the step, median of the cases",
             statistics.median(entry["cpu_share"] for entry in entries), MOST, at_least=False),
        must("the same by counted calls, largest of the cases",
             max(entry["counted_share"] for entry in entries), MOST, at_least=False),
        must("cost of a rank's page by counted calls, largest of the cases",
             max(entry["page_share"] for entry in entries), MOST_PAGE, at_least=False),
        must("cost of watching whether ranks move: page and watch, largest of the cases",
             max(entry["page_share"] + entry["watch_share"] for entry in entries), MOST_WATCH, at_least=False),
    ]  # fmt: skip
    print("\n".join(must_lines(claims)))
    result = {
        "benchmark": "measuring", "hardware": {**record, "load_average_after": hardware()["load_average"]},
        "turns": arguments.turns, "steps_of_a_turn": EVERY, "cases": entries, "musts": claims,
    }  # fmt: skip
    write_json(arguments.json, result)
    return 0


if __name__ == "__main__":
    if job_file := os.environ.get(JOB):
        rank_main(Path(job_file))
    else:
        finish(main)
