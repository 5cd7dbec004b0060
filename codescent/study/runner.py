"""In: the folder of a study, its points. Out: their repeats, run in rounds; each run in a process of its own.
Does not print (verbs/study.py does) and does not evaluate runs."""

from __future__ import annotations

import os
import resource
import signal
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from codescent.base.cores import available_cores
from codescent.launch.memory_kills import evidence, memory_kills
from codescent.results import Ended, train_run
from codescent.study.folder import StudyFolder
from codescent.study.points import Spec
from codescent.study.result import PointState

STOPPED = tuple(128 + number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
"""Exit codes of a run that was asked to stop."""

STAT = Path("/proc/stat")


@dataclass(frozen=True)
class Turn:
    """A repeat that is to be run."""

    spec: Spec
    number: int


@dataclass
class Progress:
    """Which runs there are to do, and how long the rest will take.

    Attributes:
        wall_s: seconds of the runs so far, by point.
    """

    turns: list[Turn]
    wall_s: dict[str, list[float]] = field(default_factory=dict)

    def left_s(self, done: int) -> float | None:
        """Seconds of the turns after the first `done`: as long as earlier runs of the same point; None: unknown."""
        all_s = [seconds for of_point in self.wall_s.values() for seconds in of_point]
        if not all_s:
            return None
        usual = statistics.mean(all_s)
        return sum(statistics.mean(self.wall_s.get(turn.spec.name) or [usual]) for turn in self.turns[done:])


def turns_of(folder: StudyFolder, *, retry: bool = False) -> list[Turn]:
    """The repeats that are to be run, round by round; each round has all points, in the order opposite to the last one.

    A point that has failed is not run again, except with `retry`: its failed repeats are then forgotten. So are runs
    that have not ended. Points on several machines are not run from here.
    """
    open_: dict[str, set[int]] = {}
    definition = folder.definition
    for spec in definition.specs:
        if spec.name in definition.refused or spec.nodes > 1:
            continue
        attempts = folder.attempts(spec)
        failed = [one for one in attempts if one.state not in (PointState.DONE, PointState.TO_DO)]
        if failed and not retry:
            continue
        for attempt in attempts:
            if attempt in failed or attempt.state is PointState.TO_DO:
                folder.forget(spec, attempt.number)
        done = {attempt.number for attempt in attempts if attempt.state is PointState.DONE}
        missing = [number for number in range(1, definition.repeats + 1) if number not in done]
        open_[spec.name] = set(missing[: max(0, definition.repeats - len(done))])
    specs = [spec for spec in definition.specs if spec.name in open_]
    return [
        Turn(spec, number)
        for number in range(1, definition.repeats + 1)
        for spec in (specs if number % 2 else reversed(specs))
        if number in open_[spec.name]
    ]


def run_turns(folder: StudyFolder, progress: Progress) -> Iterator[tuple[int, Turn, Ended | None]]:
    """Do the turns in order. Yields each turn twice: before its run, with None, and after it, with how it ended.

    A point that fails is left out of later rounds. Raises KeyboardInterrupt: a run was asked to stop.
    """
    failed: set[str] = set()
    for index, turn in enumerate(progress.turns):
        if turn.spec.name in failed:
            continue
        yield index, turn, None
        begin = time.monotonic()
        ended = _run(folder, turn)
        progress.wall_s.setdefault(turn.spec.name, []).append(time.monotonic() - begin)
        if ended.code:
            failed.add(turn.spec.name)
        yield index, turn, ended


def command_words(folder: StudyFolder, spec: Spec, number: int) -> list[str]:
    """The words of a repeat: overrides, and its run folder."""
    return [*spec.words, f"run.folder={folder.run_path(spec, number)}"]


def _run(folder: StudyFolder, turn: Turn) -> Ended:
    """Run a repeat and note how it ended. If this process is stopped, nothing is noted: the repeat is taken again."""
    folder.make_point(turn.spec)
    kills, meter = memory_kills(), Meter()
    ended = train_run(folder.definition.config, command_words(folder, turn.spec, turn.number))
    if ended.code in STOPPED:  # by a signal for all, which this process may not have got
        raise KeyboardInterrupt
    record: dict[str, Any] = {"code": ended.code, "why": ended.why, **meter.end()}
    if ended.code == -9:  # without a launcher nobody has looked why
        record["why"] += evidence(kills)
    folder.note(turn.spec, turn.number, record)
    return Ended(ended.code, record["why"])


class Meter:
    """Load of the machine and the time of its cores, from now until `end`."""

    def __init__(self) -> None:
        self.cores = available_cores()
        self.before = self._now()
        self.load = self._load()

    def end(self) -> Mapping[str, float]:
        """Load per core before and after, wall seconds, and the share of the cores that other programs used.

        The share is missing where a quota lets this process use fewer cores than /proc/stat counts.
        """
        wall_s, busy_s, own_s = (now - before for now, before in zip(self._now(), self.before, strict=True))
        found = {"load_before": self.load, "load_after": self._load(), "wall_s": wall_s}
        if busy_s and self.cores == _cores():
            found["others"] = min(1.0, max(0.0, (busy_s - own_s) / (wall_s * self.cores)))
        return found

    def _load(self) -> float:
        return os.getloadavg()[0] / self.cores

    def _now(self) -> Sequence[float]:
        """The clock; seconds in which the cores were busy; seconds of this process and of its children that ended."""
        own = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return time.monotonic(), _busy_s(), sum(usage.ru_utime + usage.ru_stime for usage in own)


def _cores() -> int:
    """Cores in the affinity mask of this process."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else 0


def _busy_s() -> float:
    """Seconds in which the cores of this process were busy since the machine booted; 0: unknown."""
    if sys.platform != "linux" or not STAT.is_file():
        return 0.0
    mine = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    ticks = 0
    for line in STAT.read_text().splitlines():
        name, *fields = line.split()
        if name in mine:  # https://docs.kernel.org/filesystems/proc.html#miscellaneous-kernel-statistics-in-proc-stat
            numbers = list(map(int, fields))
            ticks += sum(numbers[:8]) - numbers[3] - numbers[4]  # without idle and iowait
    return ticks / os.sysconf("SC_CLK_TCK")
