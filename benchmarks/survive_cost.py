"""In: a folder. Out: what watching, comparing and saving cost training, as shares of a step.
Measures the launcher of a run itself. The rest it takes from measuring.py, alike.py and async_saves.py.

No key switches watching off, so there is no step without it. Its processor seconds are counted instead: they are exact
where a difference of two step times is noise.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from measure import ROOT, SystemFailed, must, say, table
from survive_run import COPIES, ENDLESS, RANKS, Run
from work import environment

WATCH_S = 20.0
LAUNCHER, PAGES = "the launcher, of the ranks' processor time", "pages and heartbeats, of a step"
WATCHING, COMPARING = "watching: both", "comparing copies each 100 steps"
SAVING = "waiting for an asynchronous save, of a synchronous one"
MUST = {WATCHING: 0.005, COMPARING: 0.01, SAVING: 0.1}
OTHERS = {
    "measuring": ["--cases", "dp_replicate=2", "--turns", "5"],
    "alike": ["--work", "small", "--rounds", "20"],
    "async_saves": [],
}


def measured(place: Path) -> dict[str, float]:
    """Each cost as a share. Raises SystemFailed."""
    place.mkdir()
    found = {LAUNCHER: launcher_share(place.with_name(f"{place.name}-run"))}
    results = {name: result_of(name, options, place) for name, options in OTHERS.items()}
    (watched,) = results["measuring"]["cases"]
    found[PAGES] = watched["page_share"] + watched["beat_share"]
    found[WATCHING] = found[LAUNCHER] + found[PAGES]
    found[COMPARING] = max(one["share"] for one in results["alike"]["cases"])
    found[SAVING] = max(ratio for case in results["async_saves"]["cases"] for ratio in case["ratios"].values())
    return found


def launcher_share(place: Path) -> float:
    """Processor seconds of the launcher for each one of its ranks. They train meanwhile."""
    run = Run.start(place, [ENDLESS, COPIES, f"parallel.ranks={RANKS}"])
    try:
        run.until(lambda: run.step() > 20)
        pids = [run.launchers[0].pid, *run.ranks()]
        before = [*map(seconds_of, pids)]
        time.sleep(WATCH_S)
        launcher, *ranks = (seconds_of(pid) - earlier for pid, earlier in zip(pids, before, strict=True))
        return launcher / sum(ranks)
    finally:
        run.end()


def seconds_of(pid: int) -> float:
    """Processor seconds of a process so far. Its clock (Linux: CPUCLOCK_SCHED of a pid) counts nanoseconds."""
    return time.clock_gettime((~pid << 3) | 2)


def result_of(name: str, options: list[str], place: Path) -> dict[str, Any]:
    """Run another benchmark. Its JSON."""
    say(f"{name}.py")
    file = place / f"{name}.json"
    script = [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), *options, "--json", str(file)]
    done = subprocess.run(script, env=environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemFailed(f"{name}.py ended with {done.returncode}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def text(found: Mapping[str, float]) -> str:
    """The shares."""
    return table(["cost", "share"], [[name, f"{share:.3%}"] for name, share in found.items()])


def claims(found: Mapping[str, float]) -> list[dict[str, Any]]:
    """What is asked of them."""
    return [must(name, found[name], bound, at_least=False) for name, bound in MUST.items()]
