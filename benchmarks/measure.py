"""In: systems that take turns, numbers. Out: seconds per step by system, tables, JSON files, a record of the machine.
Does not know what a system computes, and starts no process but git."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn, Protocol

ROOT = Path(__file__).resolve().parent.parent
"""The checkout whose codescent is measured."""

SPARE_BYTES = 1_000_000_000
"""Memory that is left to the rest of the machine when it is decided how many systems are kept alive at once."""


class SystemFailed(Exception):
    """A system did not start or died; the message names it and shows the end of what it said."""


class System(Protocol):
    """Something that can be told to take some steps now, and that keeps still otherwise."""

    name: str

    def start(self) -> None:
        """Returns when it is warmed up and still. Raises SystemFailed."""

    def turn(self, num_steps: int) -> float:
        """Take `num_steps` steps now; seconds of one, on average."""

    def resting_bytes(self) -> int:
        """Resident memory now."""

    def peaks_bytes(self) -> list[int]:
        """Largest resident memory that each of its processes ever had."""

    def stop(self) -> None:
        """Ends it; harmless where it is not running."""


@dataclass
class Timing:
    """What was measured of one system: seconds per step in each of its turns, and the largest resident memory of any
    one of its processes. `sitting` numbers the groups of systems that were alive, and so interleaved, together."""

    name: str
    sitting: int
    seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0

    @property
    def median_s(self) -> float:
        """Median seconds per step."""
        return statistics.median(self.seconds)

    @property
    def best_s(self) -> float:
        """Least seconds per step."""
        return min(self.seconds)


@dataclass
class Measured:
    """All timings, and the systems that did not start with the reason. Ratios are taken inside a sitting."""

    timings: list[Timing] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)

    def find(self, name: str, sitting: int | None = None) -> Timing | None:
        """The timing of `name` in that sitting, or in the first where it took part."""
        for timing in self.timings:
            if timing.name == name and sitting in (None, timing.sitting):
                return timing
        return None

    def ratio(self, name: str, reference: str) -> float | None:
        """How many times faster `name` is than `reference` by medians, where both took turns in one sitting."""
        for timing in self.timings:
            other = self.find(reference, timing.sitting)
            if timing.name == name and other is not None:
                return other.median_s / timing.median_s
        return None


def chosen(parsed: argparse.ArgumentParser, only: str | None, names: Sequence[str]) -> list[str]:
    """Of the systems those that --only names, or begins the names of; all without it. Exits with 2 where it names
    another."""
    wanted = only.split(",") if only else list(names)
    unknown = [word for word in wanted if not any(name.startswith(word) for name in names)]
    if unknown:
        parsed.error(f"--only: no system begins with {', '.join(unknown)}; there are {', '.join(names)}")
    return [name for name in names if any(name.startswith(word) for word in wanted)]


def available_bytes() -> int:
    """Memory that programs can still take."""
    return _meminfo("MemAvailable")


def _meminfo(key: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def interleave(systems: Sequence[System], num_rounds: int, num_steps: int) -> Measured:
    """Let the systems take turns of `num_steps` steps, `num_rounds` times, in alternating order.

    As many are kept alive at once as fit into memory; where not all do, there are several sittings, and the first
    system, which the ratios refer to, takes part in each.
    """
    measured = Measured()
    reference, waiting = systems[0], list(systems[1:])
    sitting = 0
    while sitting == 0 or waiting:
        with ExitStack() as stack:
            stack.callback(reference.stop)
            say(f"sitting {sitting + 1}: starting {reference.name}")
            reference.start()
            alive = [reference]
            for system in list(waiting):
                if not _fits(alive) and len(alive) > 1:
                    break
                waiting.remove(system)
                stack.callback(system.stop)
                say(f"sitting {sitting + 1}: starting {system.name}")
                try:
                    system.start()
                except SystemFailed as failure:
                    system.stop()
                    measured.failures[system.name] = str(failure)
                    say(str(failure))
                    continue
                alive.append(system)
            measured.timings += _rounds(alive, sitting, num_rounds, num_steps)
        sitting += 1
    return measured


def _fits(alive: Sequence[System]) -> bool:
    """One more like the largest so far fits, and any one of those alive can still grow to its peak in its turn."""
    peaks_bytes = [sum(system.peaks_bytes()) for system in alive]
    growth_bytes = max(peak - system.resting_bytes() for peak, system in zip(peaks_bytes, alive, strict=True))
    return available_bytes() > max(peaks_bytes) + growth_bytes + SPARE_BYTES


def _rounds(alive: Sequence[System], sitting: int, num_rounds: int, num_steps: int) -> list[Timing]:
    timings = {system.name: Timing(system.name, sitting) for system in alive}
    for number in range(num_rounds):
        for system in alive if number % 2 == 0 else reversed(alive):
            seconds = system.turn(num_steps)
            timings[system.name].seconds.append(seconds)
            say(f"round {number + 1}/{num_rounds}  {system.name:24} {1e3 * seconds:10.1f} ms")
    for system in alive:
        timings[system.name].peak_bytes = max(system.peaks_bytes())
    return list(timings.values())


def say(line: str) -> None:
    """Progress goes to stderr, so that stdout holds the table alone."""
    print(line, file=sys.stderr, flush=True)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned by spaces: the first to the left, the others to the right."""
    widths = [max(len(line[column]) for line in [header, *rows]) for column in range(len(header))]
    lines = []
    for line in [header, ["-" * width for width in widths], *rows]:
        cells = [line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:]))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def ratio_text(ratio: float | None) -> str:
    """Two decimals, or a dash where it was not measured."""
    return "-" if ratio is None else f"{ratio:.2f}"


def must(
    claim: str, value: float | None, bound: float, *, at_least: bool = True, unit: str = "", limit: float | None = None
) -> dict[str, Any]:
    """One requirement beside what was measured: `held` is None where it was not measured.

    `limit`: what the processor allows at the most, where that was measured.
    """
    held = None if value is None else bool(value >= bound if at_least else value <= bound)
    entry = {"claim": claim, "value": value, "bound": bound, "at_least": at_least, "unit": unit, "held": held}
    return entry | {"limit": limit}


def must_lines(musts: Sequence[dict[str, Any]]) -> Iterator[str]:
    """One line per requirement: holds, does not hold, or was not measured."""
    words = {True: "holds", False: "DOES NOT HOLD", None: "not measured"}
    for entry in musts:
        sign = ">=" if entry["at_least"] else "<="
        value = "-" if entry["value"] is None else f"{entry['value']:.3g}{entry['unit']}"
        limit = "" if entry["limit"] is None else f" (matrix products alone: {entry['limit']:.3g})"
        yield f"{words[entry['held']]:>13}: {entry['claim']}: {value} {sign} {entry['bound']:g}{entry['unit']}{limit}"


def hardware() -> dict[str, Any]:
    """The machine, the software and the moment that numbers were taken on: a number without them says nothing."""
    fields: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    telling = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16")
    flags = set(fields.get("flags", "").split())
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": fields.get("model name", platform.processor()),
        "cpu_family_model": f"{fields.get('cpu family', '?')}/{fields.get('model', '?')}",
        "cpu_flags": [flag for flag in telling if flag in flags],
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": _meminfo("MemTotal"),
        "load_average": list(os.getloadavg()),
        "kernel": platform.release(),
        "libc": "-".join(platform.libc_ver()),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "transformers": _version("transformers"),
        "codescent": revision(ROOT),
    }


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def revision(checkout: Path) -> str | None:
    """Commit of a checkout, with "+" where its files differ from it; None where it is no git checkout."""
    commands = (["rev-parse", "--short=12", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
    try:
        answers = [
            subprocess.run(["git", "-C", str(checkout), *command], capture_output=True, text=True, check=True).stdout
            for command in commands
        ]
    except (OSError, subprocess.CalledProcessError):
        return None
    return answers[0].strip() + ("+" if answers[1].strip() else "")


def machine_line(record: dict[str, Any]) -> str:
    """The record of `hardware` in one line for people."""
    return (
        f"{record['cores']} cores of {record['cpu']} ({', '.join(record['cpu_flags'])}), "
        f"{record['memory_bytes'] / 2**30:.0f} GiB, torch {record['torch']}, codescent {record['codescent']}, "
        f"{record['date']}, load {record['load_average'][0]:.1f}"
    )


def write_json(path: Path | None, result: dict[str, Any]) -> None:
    """Writes `result` where the user asked for it; nothing where `path` is None."""
    if path is not None:
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def finish(main: Callable[[], int]) -> NoReturn:
    """Runs a benchmark and exits with its code; a Ctrl-C or a SIGTERM still ends its systems and removes its files."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        say("interrupted")
        sys.exit(130)


def parser(description: str) -> argparse.ArgumentParser:
    """An argument parser with the one argument that every benchmark has."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    made.add_argument("--json", type=Path, metavar="FILE", help="write the results and the hardware record to FILE")
    return made


class Checkout:
    """Argument type: a folder that holds the named files. argparse turns the error into exit code 2."""

    def __init__(self, peer: str, *files: str) -> None:
        self.peer, self.files = peer, files

    def __call__(self, text: str) -> Path:
        folder = Path(text).expanduser().resolve()
        missing = [name for name in self.files if not (folder / name).is_file()]
        if missing:
            raise argparse.ArgumentTypeError(f"{text} is no checkout of {self.peer}: it has no {', '.join(missing)}")
        return folder


def positive(text: str) -> int:
    """Argument type: a whole number of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number
