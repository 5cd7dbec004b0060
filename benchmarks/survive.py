"""In: this machine. Out: seconds from the death of a rank to the next new step, and a soak of faults, as JSON.
Does not decide how a run goes on (survive.on_loss does). Every fault is real: a signal to a rank of a real run.

The peer is `torchrun --max-restarts` with the same command and checkpoints, and `--resume=auto`, in the same sitting.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from measure import (
    finish,
    hardware,
    machine_line,
    must,
    must_lines,
    not_negative,
    parser,
    positive,
    say,
    table,
    write_json,
)
from work import environment

from codescent.checkpoint.checkpoints import Checkpoints, read_tensors

RANKS = 4
TAIL_BYTES = 4096
SAME = (
    "default", "model.preset=auto", "model.kind=gpt2", "model.num_layers=4", "model.num_heads=4",
    "model.hidden_dim=128", "model.seq_len=64", "data.seq_len=64", "train.num_threads=1",
    "train.eval_every=0", "log.every=1000",
    "log.metrics_every=1", "log.sample_tokens=0", "log.tensorboard=false", "checkpoint.every=20",
    "train.global_batch_size=48", "optimizer.decay_steps=100000", "optimizer.kind=adamw",
)  # fmt: skip
"""A run whose steps take some tens of milliseconds, and which saves about each second."""
ENDLESS = 1_000_000
OURS: dict[str, tuple[str, ...]] = {
    "restart": ("survive.on_loss=restart", f"parallel.dp_replicate={RANKS}"),
    "restart, a spare": ("survive.on_loss=restart", "survive.spares=1", f"parallel.dp_replicate={RANKS}"),
    "shrink, copies": ("survive.on_loss=shrink", f"parallel.dp_replicate={RANKS}"),
    "shrink, no copies": ("survive.on_loss=shrink", f"parallel.dp_shard={RANKS}"),
}
PEER = "torchrun --max-restarts"
MUST_S = {"restart": 6.0, "restart, a spare": 2.0, "shrink, copies": 1.0, "shrink, no copies": 10.0}
"""Seconds to the next new step, medians, on two cores."""
MUST_GROW_S, MUST_OF_PEER, MUST_EFFECTIVE = 15.0, 1 / 3, 0.6
PEER_CAN_STOP_S = 60.0
SURVIVES = ("survive.max_restarts=1000", "survive.restart_window_s=36000")


@dataclass
class Run:
    """A training run in a folder, by our launcher or by torchrun.

    Attributes:
        place: the folder in which it is started.
        process: of the launcher.
    """

    place: Path
    process: subprocess.Popen[bytes]
    _seen: dict[str, int] = field(default_factory=dict)

    @classmethod
    def start(cls, place: Path, words: Sequence[str], launcher: Sequence[str] = ()) -> Run:
        """Start a run called `a`."""
        command = [sys.executable, *(launcher or ("-m", "codescent")), "train", *SAME, "run.name=a", *words]
        with (place / "out.txt").open("ab") as out:
            return cls(place, subprocess.Popen(command, cwd=place, env=environment(), stdout=out, stderr=out))

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.place / "runs" / "a"

    def step(self) -> int:
        """The step of the last row; 0: there is none."""
        with suppress(FileNotFoundError), (self.folder / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            rows = [line for line in file.read().split(b"\n")[:-1] if line.startswith(b"{")]
            return int(json.loads(rows[-1])["step"]) if rows else 0
        return 0

    def events(self, kind: str) -> list[dict[str, Any]]:
        """The events of a kind."""
        with suppress(FileNotFoundError):
            lines = (self.folder / "events.jsonl").read_text().splitlines()
            return [event for line in lines if line.endswith("}") and (event := json.loads(line))["kind"] == kind]
        return []

    def ranks(self) -> list[int]:
        """Process ids of the ranks in the order of their starts, then of a spare, which is the newest."""
        with suppress(psutil.NoSuchProcess):
            found = psutil.Process(self.process.pid).children()
            return sorted(one.pid for one in found if one.status() != psutil.STATUS_ZOMBIE and "train" in one.cmdline())
        return []

    def until(self, holds: Callable[[], bool], seconds: float = 120.0) -> float:
        """Seconds until something holds. Raises RuntimeError: the run has ended, or it takes too long."""
        begin = time.perf_counter()
        while not holds():
            if self.process.poll() is not None or time.perf_counter() - begin > seconds:
                raise RuntimeError((self.place / "out.txt").read_text()[-3000:])
            time.sleep(0.005)
        return time.perf_counter() - begin

    def to_new_step(self, resumes: int, step: int) -> bool:
        """Whether the run has begun anew so often, and has done more than this step since."""
        return len(self.events("resume")) > resumes and self.step() > step

    def end(self) -> None:
        """End the run, and all that is left of it."""
        left = self.ranks()
        self.process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(PEER_CAN_STOP_S)
        for pid in [*left, self.process.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


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
    run.until(lambda: run.to_new_step(resumes, step))
    found.new.append(time.perf_counter() - begin)
    if grows:
        run.until(lambda: len(run.events("resume")) > resumes + 1)
        run.until(lambda: run.step() > int(run.events("resume")[-1]["step"]))
        found.grown.append(time.perf_counter() - begin)


def measured(place: Path, name: str, times: int, rng: random.Random) -> Losses:
    """Losses of ranks in one run, one after the other."""
    found, ours = Losses(), OURS.get(name)
    place.mkdir()
    endless = f"train.num_steps={ENDLESS}"
    if ours is None:
        torchrun = ("-m", "torch.distributed.run", f"--nproc-per-node={RANKS}", f"--max-restarts={10 * times}")
        layout = f"parallel.dp_replicate={RANKS}"
        run = Run.start(place, [endless, "--resume=auto", layout], (*torchrun, "-m", "codescent"))
    else:
        run = Run.start(place, [endless, f"parallel.ranks={RANKS}", *SURVIVES, *ours])
    try:
        run.until(lambda: run.step() > 40)
        for _ in range(times):
            lose(run, found, rng, grows=name.startswith("shrink"))
    finally:
        run.end()
    return found


def soak(place: Path, minutes: float, rng: random.Random) -> dict[str, Any]:
    """Random faults, each 15 s; then the weights are compared with those of a run left alone."""
    place.mkdir()
    alone = Run.start(place, ["train.num_steps=200", f"parallel.ranks={RANKS}", f"parallel.dp_replicate={RANKS}"])
    alone.process.wait(600)
    stamps = [event["monotonic_s"] for event in alone.events("checkpoint")]
    step_s = (stamps[-1] - stamps[0]) / (20 * (len(stamps) - 1))
    steps = max(200, int(minutes * 60 * MUST_EFFECTIVE / step_s))
    (place / "runs" / "a").rename(place / "runs" / "calibration")
    words = [f"train.num_steps={steps}", f"parallel.ranks={RANKS}", *OURS["restart, a spare"], *SURVIVES]
    run, faults, begin = Run.start(place, [*words, "parallel.stopped_s=3"]), 0, time.perf_counter()
    next_s = begin + 15.0
    while run.process.poll() is None:
        time.sleep(0.2)
        if time.perf_counter() < next_s or not run.step():
            continue
        next_s = time.perf_counter() + 15.0
        kind, pids = rng.choice(["kill", "kill", "stop", "two"]), run.ranks()
        for pid in rng.sample(pids, min(len(pids), 2 if kind == "two" else 1)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP if kind == "stop" else signal.SIGKILL)
        faults += 1
    wall_s, code, left = time.perf_counter() - begin, run.process.returncode, run.ranks()
    (place / "runs" / "a").rename(place / "runs" / "faults")
    again = Run.start(place, [*words[:1], f"parallel.ranks={RANKS}", f"parallel.dp_replicate={RANKS}"])
    again.process.wait()
    weights = [_weights(place / "runs" / name) for name in ("faults", "a")]
    same = weights[0].keys() == weights[1].keys() and all(
        bool((weights[0][name] == weights[1][name]).all()) for name in weights[0]
    )
    return {
        "exit_code": code, "faults": faults, "steps": steps, "wall_s": wall_s, "step_s_alone": step_s,
        "effective": steps * step_s / wall_s, "same_weights": same, "processes_left": left,
    }  # fmt: skip


def _weights(folder: Path) -> dict[str, Any]:
    saved = Checkpoints(folder / "checkpoints", 1, False).latest()
    assert saved is not None
    return read_tensors(saved.path)


def arguments_of() -> argparse.Namespace:
    """The command line."""
    parsed = parser("Kill ranks of runs, and time how they go on; beside torchrun with the same checkpoints.")
    parsed.add_argument("--times", type=positive, default=20, help="losses of each kind (default 20)")
    parsed.add_argument("--soak", type=not_negative, default=0.0, metavar="MINUTES", help="then a fault each 15 s")
    parsed.add_argument("--only", nargs="+", choices=[*OURS, PEER], default=[*OURS, PEER], help="these kinds alone")
    parsed.add_argument("--seed", type=int, default=1, help="of the moments and of the ranks")
    return parsed.parse_args()


def _median(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.2f}" if seconds else ""


def main() -> int:
    """Measure all kinds, and print the table."""
    arguments, record = arguments_of(), hardware()
    say(machine_line(record))
    rng, found = random.Random(arguments.seed), dict[str, Losses]()
    with tempfile.TemporaryDirectory(prefix="survive-") as folder:
        for number, name in enumerate(arguments.only):
            found[name] = measured(Path(folder) / str(number), name, arguments.times, rng)
            say(f"{name}: first step {statistics.median(found[name].first):.2f} s")
        shaken = soak(Path(folder) / "soak", arguments.soak, rng) if arguments.soak else None
    rows = [
        [name, f"{len(one.new)} of {one.tried}", *map(_median, (one.first, one.new, one.grown)), f"{max(one.new):.2f}"]
        for name, one in found.items()
    ]
    print(table(["ranks die with", "went on", "first step, s", "new step, s", "all ranks, s", "worst, s"], rows))

    def most(claim: str, value: float, bound: float, unit: str = " s") -> dict[str, Any]:
        return must(claim, value, bound, at_least=False, unit=unit)

    musts = [
        most(f"first step with {name}", statistics.median(found[name].first), bound)
        for name, bound in MUST_S.items()
        if name in found
    ]
    grown = [seconds for one in found.values() for seconds in one.grown]
    musts += [most("all ranks take part again", statistics.median(grown), MUST_GROW_S)] if grown else []
    if PEER in found and "restart" in found:
        ratio = statistics.median(found["restart"].new) / statistics.median(found[PEER].new)
        musts.append(most(f"lost seconds of restart over those of {PEER}", ratio, MUST_OF_PEER, ""))
    if shaken is not None:
        say(json.dumps(shaken))
        musts.append(must("effective training time of the soak", shaken["effective"], MUST_EFFECTIVE))
    for line in must_lines(musts):
        print(line)
    kinds = {name: vars(one) for name, one in found.items()}
    write_json(
        arguments.json, {"benchmark": "survive", "hardware": record, "kinds": kinds, "soak": shaken, "musts": musts}
    )
    return 0


if __name__ == "__main__":
    finish(main)
