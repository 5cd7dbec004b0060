"""In: nothing. Out: seconds of a step of `codescent train` with one thread and with several, alone and beside programs
that use a core each, with different lengths of spinning.
Does not measure a peer. It makes the competing load itself, in turns, so measure on a machine without other load."""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
from systems import Watched, die_with_parent
from work import WORKS, Work, environment, training, write_tokens

from codescent.base.counted import counted

BUSY = "while True: pass"
LIBRARY = "GOMP_SPINCOUNT=300000"
"""libgomp's own spins, if no variable is set."""

Cells = dict[str, dict[str, list[float]]]
"""Seconds per step of each turn, by system and by load ("alone", "beside")."""


def arguments_of() -> argparse.Namespace:
    """The command line."""
    cores = len(os.sched_getaffinity(0))
    parsed = parser("Time `codescent train` with one thread and with several, alone and beside a busy process.")
    parsed.add_argument("--work", choices=tuple(WORKS), default="small", help="sizes of model and step")
    parsed.add_argument("--threads", type=positive, default=cores, help="the larger number of threads per rank")
    parsed.add_argument("--ranks", type=positive, default=1, help="ranks of every system")
    parsed.add_argument("--busy", type=positive, default=1, help="processes that use a core each, beside the run")
    parsed.add_argument("--rounds", type=positive, default=7, help="turns of every system, alone and beside")
    parsed.add_argument("--steps", type=positive, help="steps per turn; if not given, 1 on gpt2-124m and 50 on small")
    parsed.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parsed.add_argument("--spins", default="0,1000", metavar="N,...", help="more values of GOMP_SPINCOUNT")
    return parsed.parse_args()


def systems_of(arguments: argparse.Namespace, work: Work, folder: Path) -> list[Watched]:
    """One thread; several with our spins and with libgomp's; several with other spins."""
    tokens = write_tokens(folder, work.vocab_size)
    many = arguments.threads
    variants: dict[str, tuple[int, dict[str, str]]] = {
        "1 thread": (1, {}),
        counted(many, "thread"): (many, {}),
        f"{counted(many, 'thread')}, libgomp's spins": (many, dict([LIBRARY.split("=")])),
    }
    for spins in filter(None, arguments.spins.split(",")):
        variants[f"{counted(many, 'thread')}, {spins} spins"] = (many, {"GOMP_SPINCOUNT": spins})
    systems = []
    for number, (name, (threads, extra)) in enumerate(variants.items()):
        run = folder / f"run-{number}"
        argv = training(
            work, tokens, run,
            f"train.num_threads={threads}", f"train.precision={arguments.precision}",
            f"parallel.ranks={arguments.ranks}", f"parallel.dp_replicate={arguments.ranks}",
        )  # fmt: skip
        systems.append(Watched(name, argv, {**environment(), **extra}, folder, run / "metrics.csv", 3))
    return systems


@contextlib.contextmanager
def beside(count: int) -> Iterator[None]:
    """Processes that compute without end."""
    busy = [subprocess.Popen([sys.executable, "-c", BUSY], preexec_fn=die_with_parent) for _ in range(count)]
    try:
        time.sleep(0.2 if count else 0.0)
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def measure(systems: list[Watched], arguments: argparse.Namespace, steps: int) -> Cells:
    """All systems in turns, alone and beside busy processes."""
    cells: Cells = {system.name: {"alone": [], "beside": []} for system in systems}
    with contextlib.ExitStack() as stack:
        for system in systems:
            stack.callback(system.stop)
            say(f"starting {system.name}")
            system.start()
        for number in range(arguments.rounds):
            for system in systems if number % 2 == 0 else reversed(systems):
                for load, count in (("alone", 0), ("beside", arguments.busy)):
                    with beside(count):
                        seconds = system.turn(steps)
                    cells[system.name][load].append(seconds)
                    say(f"round {number + 1}/{arguments.rounds}  {system.name:32} {load:6} {1e3 * seconds:9.1f} ms")
    return cells


def show(cells: Cells) -> str:
    """Medians, and the ratios to one thread under the same load."""
    one = {load: statistics.median(seconds) for load, seconds in cells["1 thread"].items()}
    lines = []
    for name, by_load in cells.items():
        line = [name]
        for load, seconds in by_load.items():
            median = statistics.median(seconds)
            line += [f"{1e3 * median:.1f}", f"{1e3 * min(seconds):.1f}", f"{one[load] / median:.2f}"]
        lines.append(line)
    return table(["system", "ms alone", "best", "x 1 thread", "ms beside", "best", "x 1 thread"], lines)


def musts(cells: Cells, many: int) -> list[dict[str, Any]]:
    """Short spins lose nothing alone, and are no slower than libgomp's beside a busy process."""
    name = counted(many, "thread")
    ratio = {
        load: statistics.median(cells[f"{name}, libgomp's spins"][load]) / statistics.median(cells[name][load])
        for load in ("alone", "beside")
    }
    return [
        must("alone: speed over that with libgomp's spins", ratio["alone"], 0.98),
        must("beside: speed over that with libgomp's spins", ratio["beside"], 1.0),
    ]


def main() -> int:
    """Measure and print. Returns 1 if a system failed, else 0, even if a requirement does not hold."""
    arguments = arguments_of()
    record = hardware()
    steps = arguments.steps or (50 if arguments.work == "small" else 1)
    try:
        with tempfile.TemporaryDirectory(prefix="codescent-threads-") as folder:
            systems = systems_of(arguments, WORKS[arguments.work], Path(folder))
            cells = measure(systems, arguments, steps)
    except SystemFailed as failure:
        say(str(failure))
        return 1
    claims = musts(cells, arguments.threads)
    load = f"{arguments.ranks} rank(s), {arguments.busy} busy process(es)"
    print(machine_line(record), load, "", show(cells), "", sep="\n")
    print("\n".join(must_lines(claims)))
    result = {"benchmark": "threads", "hardware": record, "work": vars(WORKS[arguments.work]), "seconds": cells}
    options = {name: value for name, value in vars(arguments).items() if name != "json"}
    write_json(arguments.json, {**result, "arguments": options, "musts": claims})
    return 0


if __name__ == "__main__":
    finish(main)
