"""In: a folder. Out: seconds from the death of a rank to the next step: with each policy, and by torchrun's restarts.
Does not decide how a run goes on (survive.on_loss does).

The peer is `torchrun --max-restarts` with the same command and checkpoints, and `--resume=auto`, in the same sitting.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from measure import must, table
from survive_run import COPIES, ENDLESS, RANKS, SURVIVES, Run

OURS: dict[str, tuple[str, ...]] = {
    "restart": ("survive.on_loss=restart", COPIES),
    "restart, a spare": ("survive.on_loss=restart", "survive.spares=1", COPIES),
    "shrink, copies": ("survive.on_loss=shrink", COPIES),
    "shrink, no copies": ("survive.on_loss=shrink", f"parallel.dp_shard={RANKS}"),
}
PEER = "torchrun --max-restarts"
KINDS = (*OURS, PEER)
MUST_S = {"restart": 6.0, "restart, a spare": 2.0, "shrink, copies": 1.0, "shrink, no copies": 10.0}
"""Seconds to the first step, medians, on two cores."""
MUST_GROW_S, MUST_OF_PEER = 15.0, 1 / 3


@dataclass
class Losses:
    """What losses of ranks cost, in seconds.

    Attributes:
        first: from the kill to the first step of the new start, which may be one that was done before.
        new: from the kill to the first step that no start had done.
        grown: from the kill until all ranks take part again.
        tried: how many ranks were killed.
    """

    first: list[float] = field(default_factory=list)
    new: list[float] = field(default_factory=list)
    grown: list[float] = field(default_factory=list)
    tried: int = 0


def lose(run: Run, found: Losses, rng: random.Random, *, grows: bool) -> None:
    """Kill one rank at a random moment, and measure."""
    time.sleep(rng.uniform(1.0, 2.0))
    resumes, step, victim = len(run.events("resume")), run.step(), rng.choice(run.ranks()[:RANKS])
    found.tried += 1
    os.kill(victim, signal.SIGKILL)
    begin = time.perf_counter()
    run.until(lambda: len(run.events("resume")) > resumes)
    resumed = int(run.events("resume")[-1]["step"])
    run.until(lambda: run.step() > resumed)
    found.first.append(time.perf_counter() - begin)
    run.until(lambda: len(run.events("resume")) > resumes and run.step() > step)
    found.new.append(time.perf_counter() - begin)
    if grows:
        run.until(lambda: len(run.events("resume")) > resumes + 1)
        run.until(lambda: run.step() > int(run.events("resume")[-1]["step"]))
        found.grown.append(time.perf_counter() - begin)


def measured(place: Path, name: str, times: int, rng: random.Random) -> Losses:
    """Losses of ranks in one run, one after the other."""
    found, ours = Losses(), OURS.get(name)
    if ours is None:
        torchrun = ("-m", "torch.distributed.run", f"--nproc-per-node={RANKS}", f"--max-restarts={10 * times}")
        run = Run.start(place, [ENDLESS, "--resume=auto", COPIES], (*torchrun, "-m", "codescent"))
    else:
        run = Run.start(place, [ENDLESS, f"parallel.ranks={RANKS}", *SURVIVES, *ours])
    try:
        run.until(lambda: run.step() > 40)
        for _ in range(times):
            if "spare" in name:
                run.until(run.has_spare)
            lose(run, found, rng, grows=name.startswith("shrink"))
    finally:
        run.end()
    return found


def text(found: Mapping[str, Any]) -> str:
    """A table of the losses of all kinds."""

    def median(seconds: list[float]) -> str:
        return f"{statistics.median(seconds):.2f}" if seconds else ""

    rows = [
        [name, f"{len(one['new'])} of {one['tried']}", *(median(one[key]) for key in ("first", "new", "grown")),
         f"{max(one['new']):.2f}"]
        for name, one in found.items()
    ]  # fmt: skip
    return table(["ranks die with", "went on", "first step, s", "new step, s", "all ranks, s", "worst, s"], rows)


def claims(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What is asked of them."""

    def most(claim: str, value: float, bound: float, unit: str = " s") -> dict[str, Any]:
        return must(claim, value, bound, at_least=False, unit=unit)

    medians = {name: statistics.median(one["first"]) for name, one in found.items()}
    musts = [most(f"first step with {name}", medians[name], bound) for name, bound in MUST_S.items() if name in found]
    grown = [seconds for one in found.values() for seconds in one["grown"]]
    musts += [most("all ranks take part again", statistics.median(grown), MUST_GROW_S)] if grown else []
    if PEER in found and "restart" in found:
        ratio = statistics.median(found["restart"]["new"]) / statistics.median(found[PEER]["new"])
        musts.append(most(f"lost seconds of restart over those of {PEER}", ratio, MUST_OF_PEER, ""))
    return musts
