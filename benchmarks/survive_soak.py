"""In: minutes. Out: a run of 4 ranks with a fault each 15 s: whether it ends as one left alone, and what it took.
Does not restart anything itself: the launcher does. Faults are signals, and a flipped bit of the newest checkpoint."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from measure import must, say, table
from survive_flips import flip_file
from survive_run import COPIES, ENDLESS, RANKS, SURVIVES, Run

from codescent.checkpoint.checkpoints import CheckpointError, Checkpoints, read_tensors

EVERY_S, STOPPED_S = 15.0, 3.0
SHARE_ALONE = 0.7
"""The run left alone lasts for so much of the minutes. With faults its steps take about all of them."""
MOST_TIMES, MOST_MORE_S = 4, 300.0
"""A run that takes so many times the minutes, and so many seconds more, does not end."""
MUST_EFFECTIVE = 0.6
KILL, TWO, STOP, SPARE, FIRST, DAMAGE = "kill one", "kill two", "stop one", "kill the spare", "kill rank 0", "kill all"
FAULTS = (KILL, TWO, STOP, SPARE, FIRST, DAMAGE)
"""DAMAGE kills all ranks, and flips a bit of the newest checkpoint, so that the one before has to be read."""
WORDS = (f"parallel.ranks={RANKS}", COPIES)
RESTART = ("survive.on_loss=restart", "survive.spares=1", f"parallel.stopped_s={STOPPED_S:g}", *SURVIVES)
CONSISTS = ("start", "detection", "meeting and reading", "steps done again", "slower steps")


@dataclass
class Made:
    """A fault that was made.

    Attributes:
        at_s: when, by the clock of the events.
        step: the newest row then.
    """

    kind: str
    at_s: float
    step: int


@dataclass
class Left:
    """What is looked for when the run has ended.

    Attributes:
        ports: at which its processes have listened.
        processes: that carry its mark.
        folder: of its temporary files.
    """

    folder: Path
    ports: set[int] = field(default_factory=set)

    def look(self) -> None:
        """Note at which ports it listens now."""
        for pid in self.processes():
            with suppress(psutil.Error):
                found = psutil.Process(pid).net_connections("tcp")
                self.ports |= {one.laddr.port for one in found if one.status == psutil.CONN_LISTEN}

    def processes(self) -> list[int]:
        """Processes of the run: they have its temporary folder."""
        found = []
        for one in psutil.process_iter():
            with suppress(psutil.Error):
                if one.environ().get("TMPDIR") == str(self.folder) and one.status() != psutil.STATUS_ZOMBIE:
                    found.append(one.pid)
        return found

    def after(self) -> dict[str, list[Any]]:
        """Processes, ports and temporary files that are left."""
        listed = subprocess.run(["ss", "-ltnH"], capture_output=True, text=True, check=True).stdout
        open_now = {int(line.split()[3].rpartition(":")[2]) for line in listed.splitlines()}
        files = [*self.folder.glob("codescent-*"), *Path("/dev/shm").glob("codescent*")]
        return {"processes": self.processes(), "ports": sorted(self.ports & open_now), "files": [*map(str, files)]}


def soak(place: Path, minutes: float, rng: random.Random) -> dict[str, Any]:
    """Train alone for a time; then as many steps with faults; compare."""
    alone = Run.start(place.with_name(f"{place.name}-alone"), [ENDLESS, *WORDS])
    try:
        alone.until(lambda: alone.step() > 0)
        time.sleep(60 * minutes * SHARE_ALONE)
    finally:
        alone.end()
    steps = alone.step()
    step_s = pace_s(alone)
    say(f"alone: {steps} steps of {1e3 * step_s:.0f} ms")
    begin_s = time.monotonic()
    run = Run.start(place, [f"train.num_steps={steps}", *WORDS, *RESTART])
    left = Left(place)
    try:
        made = shaken(run, steps, begin_s + 60 * minutes * MOST_TIMES + MOST_MORE_S, left, rng)
        code = run.launchers[0].poll()
        wall_s = time.monotonic() - begin_s
        time.sleep(2.0)  # what ends with the launcher has so long (docs/launch.md)
        after = left.after()
    finally:
        run.end()
    hashes = [hash_of(one.folder) for one in (alone, run)]
    return {
        "minutes": minutes, "exit_code": code, "faults": Counter(one.kind for one in made), "steps": steps,
        "wall_s": wall_s, "step_s_alone": step_s, "effective": steps * step_s / wall_s,
        "where_s": where(run, made, begin_s, step_s, wall_s - steps * step_s), "same_weights": len({*hashes}) == 1,
        "hashes": hashes, "set_aside": len(run.events("checkpoint_set_aside")), "left": after,
        "said": "" if code == 0 else run.said()[-3000:],
    }  # fmt: skip


def pace_s(run: Run) -> float:
    """Seconds of a step, with its share of saving: between the checkpoints of a run."""
    saved = run.events("checkpoint")
    return float((saved[-1]["monotonic_s"] - saved[0]["monotonic_s"]) / (saved[-1]["step"] - saved[0]["step"]))


def shaken(run: Run, steps: int, end_s: float, left: Left, rng: random.Random) -> list[Made]:
    """Make faults, each kind as often as the others, until the run has done all its steps.

    Between two faults there is a new step: a run whose starts make no step ends, and shall.
    """
    made: list[Made] = []
    order: list[str] = []
    next_s, resumes = time.monotonic() + EVERY_S, 0
    while run.is_running and time.monotonic() < end_s:
        time.sleep(0.2)
        if time.monotonic() < next_s or not goes_on(run, resumes, steps) or len(places := run.places()) < RANKS:
            continue
        order = order or rng.sample(FAULTS, len(FAULTS))
        left.look()
        kind, step, before = order.pop(), run.step(), len(run.events("resume"))
        if make(run, kind, places, rng):
            made.append(Made(kind, time.monotonic(), step))
            say(f"{kind} at step {step}")
            resumes = before + (kind != SPARE)
        else:
            order.insert(0, kind)  # later
        next_s = time.monotonic() + EVERY_S
    return made


def goes_on(run: Run, resumes: int, steps: int) -> bool:
    """Whether the run has resumed so often, has taken a step since, and has more than one before it."""
    resumed, step = run.events("resume"), run.step()
    if len(resumed) < resumes or step >= steps - 1:
        return False
    return step > (int(resumed[-1]["step"]) if resumed else 0)


def make(run: Run, kind: str, places: Mapping[int, int], rng: random.Random) -> bool:
    """Make a fault. False: there is nothing to harm now."""
    waiting = [pid for pid in run.ranks() if pid not in places.values()]
    if kind == DAMAGE:
        for pid in places.values():
            send(pid, signal.SIGSTOP)  # else they save another one, or delete one
        saved = sorted((run.folder / "checkpoints").glob("step_*"))
        if len(saved) < 2:  # none would be left
            for pid in places.values():
                send(pid, signal.SIGCONT)
            return False
        file = rng.choice(sorted(saved[-1].glob("*.safetensors")))
        flip_file(file, rng.randrange(8 * file.stat().st_size))
    victims = {
        SPARE: waiting, FIRST: [places[0]], TWO: rng.sample([*places.values()], 2), DAMAGE: [*places.values()],
    }.get(kind) or ([] if kind == SPARE else [rng.choice([*places.values()])])  # fmt: skip
    for pid in victims:
        send(pid, signal.SIGSTOP if kind == STOP else signal.SIGKILL)
    return bool(victims)


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process that may have ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def where(run: Run, made: Sequence[Made], begin_s: float, step_s: float, lost_s: float) -> dict[str, float]:
    """What the seconds that were lost consist of. Slower steps are the rest: others import while ranks compute."""
    begun, crashes, resumes = run.events("start"), run.events("crash"), run.events("resume")
    found = dict.fromkeys(CONSISTS, 0.0)
    found["start"] = begun[0]["monotonic_s"] - begin_s if begun else 0.0
    for fault, until_s in zip(made, [*(one.at_s for one in made[1:]), float("inf")], strict=True):
        seen = [one["monotonic_s"] for one in crashes if fault.at_s - 0.1 <= one["monotonic_s"] < until_s]
        back = [one for one in resumes if fault.at_s <= one["monotonic_s"] < until_s]
        if not (seen and back):
            continue  # it has killed a spare, or the run has ended
        found["detection"] += max(0.0, seen[0] - fault.at_s)
        found["meeting and reading"] += back[-1]["monotonic_s"] - seen[0]
        found["steps done again"] += max(0, fault.step - back[-1]["step"]) * step_s
    found["slower steps"] = lost_s - sum(found.values())
    return found


def hash_of(folder: Path) -> str:
    """A hash of all tensors of the newest checkpoint, weights and optimizer state; or why there is none."""
    try:
        saved = Checkpoints(folder / "checkpoints", 1, False).latest()
        tensors = {} if saved is None else read_tensors(saved.path)
    except CheckpointError as error:  # the run has ended early
        return str(error)
    digest = hashlib.sha256(str(saved and saved.step).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode())
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def text(found: Mapping[str, Any]) -> str:
    """Where the time went."""
    rows = [["steps", f"{found['steps'] * found['step_s_alone']:.0f}", f"{found['effective']:.1%}"]]
    rows += [[name, f"{seconds:.0f}", f"{seconds / found['wall_s']:.1%}"] for name, seconds in found["where_s"].items()]
    faults = ", ".join(f"{kind} {often}" for kind, often in sorted(found["faults"].items()))
    return f"{table(['soak', 's', 'share'], rows)}\n\nfaults: {faults}; the launcher ended with {found['exit_code']}"


def claims(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What is asked of it."""
    left = sum(map(len, found["left"].values()))
    return [
        must("the soak ends with exit code 0, 1: it does", float(found["exit_code"] == 0), 1.0),
        must("weights and optimizer state are those of the run left alone, 1: they are", found["same_weights"], 1.0),
        must("effective training time of the soak", found["effective"], MUST_EFFECTIVE),
        must("processes, ports and temporary files that are left", left, 0, at_least=False),
    ]
