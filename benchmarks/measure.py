"""In: systems to measure. Out: seconds per step of each, measured in turns; tables, JSON files, a machine record.
Does not know what a system computes, and does not start a process except git."""

from __future__ import annotations

import argparse
import datetime
import json
import math
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
"""The checkout of codescent that is measured."""

SPARE_BYTES = 1_000_000_000
"""Memory left free for other programs when systems run at the same time."""


class SystemFailed(Exception):
    """A system did not start, or ended. The message names the system and has the end of its output."""


class System(Protocol):
    """A training program that takes steps on request, and uses no core between requests."""

    name: str

    def start(self) -> None:
        """Start it, and return after its warm-up steps. Raises SystemFailed."""

    def turn(self, num_steps: int) -> float:
        """Take `num_steps` steps. Returns the mean seconds of a step."""

    def resting_bytes(self) -> int:
        """Resident memory now."""

    def peaks_bytes(self) -> list[int]:
        """Peak resident memory of each of its processes."""

    def stop(self) -> None:
        """End it. Does nothing if it is not running."""


@dataclass
class Timing:
    """The measurements of one system.

    Attributes:
        name: of the system.
        sitting: number of the group of systems that ran at the same time and took turns.
        seconds: per step, for each turn.
        peak_bytes: peak resident memory of its largest process.
    """

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
        """Smallest seconds per step."""
        return min(self.seconds)


@dataclass
class Measured:
    """All timings, and the reasons why systems did not start. Ratios compare timings of the same sitting."""

    timings: list[Timing] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)

    def find(self, name: str, sitting: int | None = None) -> Timing | None:
        """The timing of `name` in a sitting (None: in the first that has it); None if there is none."""
        for timing in self.timings:
            if timing.name == name and sitting in (None, timing.sitting):
                return timing
        return None

    def ratio(self, name: str, reference: str) -> float | None:
        """How many times faster `name` is than `reference`, by medians; None if no sitting had both."""
        for timing in self.timings:
            other = self.find(reference, timing.sitting)
            if timing.name == name and other is not None:
                return other.median_s / timing.median_s
        return None


def chosen(parsed: argparse.ArgumentParser, only: str | None, names: Sequence[str]) -> list[str]:
    """The systems whose names begin with a word of --only; all systems without it. Exits with 2 for an unknown word."""
    wanted = only.split(",") if only else list(names)
    unknown = [word for word in wanted if not any(name.startswith(word) for name in names)]
    if unknown:
        parsed.error(f"--only: no system begins with {', '.join(unknown)}; the systems are {', '.join(names)}")
    return [name for name in names if any(name.startswith(word) for word in wanted)]


def available_bytes() -> int:
    """Memory that is available to programs."""
    return _meminfo("MemAvailable")


def _meminfo(key: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def interleave(systems: Sequence[System], num_rounds: int, num_steps: int) -> Measured:
    """Let the systems take turns of `num_steps` steps, `num_rounds` times, in alternating order.

    As many systems run at the same time as fit into memory. If not all fit, there are several sittings. The first
    system takes part in each, because ratios are relative to it.
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
    """Whether memory suffices for one more system of the largest size, while one running system grows to its peak."""
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
    """Print progress to stderr, so that stdout has only the table."""
    print(line, file=sys.stderr, flush=True)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A text table: the first column is aligned to the left, the others to the right."""
    widths = [max(len(line[column]) for line in [header, *rows]) for column in range(len(header))]
    lines = []
    for line in [header, ["-" * width for width in widths], *rows]:
        cells = [line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:]))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def ratio_text(ratio: float | None) -> str:
    """A ratio with two decimals, or a dash if it was not measured."""
    return "-" if ratio is None else f"{ratio:.2f}"


def must(
    claim: str, value: float | None, bound: float, *, at_least: bool = True, unit: str = "", limit: float | None = None
) -> dict[str, Any]:
    """A requirement and the measured value. `held` is whether the value fulfils it; None: not measured.

    `limit` is the largest value that the processor allows, if that was measured.
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
    """The machine, the software and the time of a measurement."""
    fields: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    relevant = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16")
    flags = set(fields.get("flags", "").split())
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": fields.get("model name", platform.processor()),
        "cpu_family_model": f"{fields.get('cpu family', '?')}/{fields.get('model', '?')}",
        "cpu_flags": [flag for flag in relevant if flag in flags],
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
    """The commit of a checkout, with "+" if its files were changed; None if it is not a git checkout."""
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
    """Write `result` to `path`; do nothing if `path` is None."""
    if path is not None:
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def finish(main: Callable[[], int]) -> NoReturn:
    """Run a benchmark and exit with its code. Ctrl-C and SIGTERM also end its systems and remove its files."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        say("interrupted")
        sys.exit(130)


def parser(description: str) -> argparse.ArgumentParser:
    """An argument parser with the argument --json, which every benchmark has."""
    parsed = argparse.ArgumentParser(
        allow_abbrev=False, description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parsed.add_argument(
        "--json", type=new_file, metavar="FILE", help="write the results and the hardware record to FILE"
    )
    return parsed


def new_file(text: str) -> Path:
    """Argument type: a file that can be written, so that a long measurement is not lost at its end."""
    path = Path(text).expanduser()
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder; give the name of a file")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written: permission denied")
    return path


class Checkout:
    """Argument type: a folder that has the named files. argparse turns the error into exit code 2."""

    def __init__(self, peer: str, *files: str) -> None:
        self.peer, self.files = peer, files

    def __call__(self, text: str) -> Path:
        folder = Path(text).expanduser().resolve()
        missing = [name for name in self.files if not (folder / name).is_file()]
        if missing:
            raise argparse.ArgumentTypeError(f"{text} is not a checkout of {self.peer}: it lacks {', '.join(missing)}")
        return folder


def not_negative(text: str) -> float:
    """Argument type: a number of at least 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return number


def whole(text: str) -> int:
    """Argument type: a whole number of at least 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


def positive(text: str) -> int:
    """Argument type: a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)
