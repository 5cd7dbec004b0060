"""In: a folder. Out: seconds from a fault to the words that name it: a kill, a stop, a link that is cut.
Does not measure how a run goes on (survive_losses.py does). Cutting a link needs root, for network namespaces."""

from __future__ import annotations

import os
import random
import signal
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hosts
from measure import must, say, table
from survive_run import COPIES, ENDLESS, RANKS, Run

CRASH, STOPPED, HANG = "a rank is killed", "a rank is stopped: the line", "a rank is stopped: the page"
CUT, ENDED = "a link is cut: the page of the slower side", "a link is cut: both sides have ended"
TIMEOUT_S = 10
"""Of collectives, where a link is cut (parallel.timeout_s)."""
MUST_S = {CRASH: 1.0, STOPPED: 3.0, HANG: 10.0, CUT: 12.0, ENDED: TIMEOUT_S + 16.0}
"""A page: 6 s without a step, a look each second, 2.5 s for the answer of the other host. An end: the timeout, 4 s to
name the rank, 10 s until ranks that do not end are killed, and a look."""
BEGUN = 5
"""Steps after which the launcher knows how long one takes."""
ALL_HERE = (ENDLESS, COPIES, f"parallel.ranks={RANKS}")


def measured(place: Path, tries: int, rng: random.Random) -> dict[str, list[float]]:
    """All of them, so many times. Without root no link is cut."""
    found: dict[str, list[float]] = {CRASH: [], STOPPED: [], HANG: [], CUT: [], ENDED: []}
    for number in range(tries):
        found[CRASH].append(killed(place.with_name(f"{place.name}-kill{number}"), rng))
    stopped(place.with_name(f"{place.name}-stop"), tries, found, rng)
    if reason := hosts.missing():
        say(f"no link is cut: {reason}")
    for number in range(0 if reason else tries):
        cut(place.with_name(f"{place.name}-cut{number}"), found)
    return {name: seconds for name, seconds in found.items() if seconds}


def killed(place: Path, rng: random.Random) -> float:
    """Seconds from the kill of a rank to the line that names it."""
    run = Run.start(place, ALL_HERE)
    try:
        run.until(lambda: run.step() > BEGUN)
        time.sleep(rng.uniform(0.0, 0.5))
        rank = rng.randrange(RANKS)
        words = f"rank {rank} of {RANKS} (pid {run.pid_of(rank)}"
        os.kill(run.pid_of(rank), signal.SIGKILL)
        return run.until(lambda: words in run.said() and "was killed by SIGKILL" in run.said(), runs=False)
    finally:
        run.end()


def stopped(place: Path, tries: int, found: dict[str, list[float]], rng: random.Random) -> None:
    """The same of a rank that is stopped, again and again in one run: its line, then the verdict."""
    run = Run.start(place, ALL_HERE)
    try:
        run.until(lambda: run.step() > BEGUN)
        for _ in range(tries):
            time.sleep(rng.uniform(1.0, 2.0))
            rank, before = rng.randrange(RANKS), len(run.said())
            pid = run.pid_of(rank)
            os.kill(pid, signal.SIGSTOP)
            line_s = said_s(run, f"rank {rank} of {RANKS} (pid {pid}) is stopped", before)
            found[STOPPED].append(line_s)
            found[HANG].append(line_s + said_s(run, f"likely cause: rank {rank} is stopped", before))
            os.kill(pid, signal.SIGCONT)
            said_s(run, "the ranks go on after", before)
    finally:
        run.end()


def said_s(run: Run, words: str, before: int) -> float:
    """Seconds until the run says so, after so many characters."""
    return run.until(lambda: words in run.said()[before:])


def cut(place: Path, found: dict[str, list[float]]) -> None:
    """A link between two hosts is cut, for good. Neither is told."""
    with hosts.Hosts(2) as made:
        run = Run.on_hosts(made, place, [ENDLESS, COPIES, f"parallel.timeout_s={TIMEOUT_S}"])
        try:
            run.until(lambda: run.step() > BEGUN)
            made.cut(1)
            begin = time.perf_counter()
            said_s: dict[Path, float] = {}

            def all_have_ended() -> bool:
                for log in run.logs:
                    if log not in said_s and "likely cause" in log.read_text(encoding="utf-8", errors="replace"):
                        said_s[log] = time.perf_counter() - begin
                return all(process.poll() is not None for process in run.launchers)

            run.until(all_have_ended, runs=False)
            found[ENDED].append(time.perf_counter() - begin)
            found[CUT].append(max(said_s.values()) if len(said_s) == made.count else float("inf"))
        finally:
            run.end()


def text(found: Mapping[str, list[float]]) -> str:
    """A table of the seconds."""
    rows = [
        [name, str(len(seconds)), *(f"{one:.2f}" for one in (statistics.median(seconds), max(seconds)))]
        for name, seconds in found.items()
    ]
    return table(["fault", "times", "median, s", "worst, s"], rows)


def claims(found: Mapping[str, list[float]]) -> list[dict[str, Any]]:
    """What is asked of them."""
    return [
        must(name, statistics.median(found[name]), bound, at_least=False, unit=" s")
        for name, bound in MUST_S.items()
        if name in found
    ]
