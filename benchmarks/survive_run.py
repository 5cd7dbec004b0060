"""In: a folder, words of `codescent train`. Out: a run of 4 ranks of a small model there: its step, events, processes.
Does not harm it: survive_losses.py, survive_detection.py and survive_soak.py do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from hosts import Hosts, address
from measure import SystemFailed
from work import environment

from codescent.launch.local_ranks import LocalRanks

RANKS = 4
TAIL_BYTES = 4096
NAME = "a"
SAME = (
    "default", f"run.name={NAME}", "model.preset=auto", "model.kind=gpt2", "model.num_layers=4", "model.num_heads=4",
    "model.hidden_dim=128", "model.seq_len=64", "data.seq_len=64", "train.num_threads=1", "train.matmul=exact",
    "train.eval_every=0", "log.every=1000",
    "log.metrics_every=1", "log.sample_tokens=0", "log.tensorboard=false", "checkpoint.every=20",
    "train.global_batch_size=48", "optimizer.decay_steps=100000", "optimizer.kind=adamw",
)  # fmt: skip
"""A run whose steps take some tens of milliseconds, and which saves about each second. Two such runs are compared
bit by bit, so nothing that rounds is chosen by a trial."""
COPIES = f"parallel.dp_replicate={RANKS}"
ENDLESS = "train.num_steps=1000000"
SURVIVES = ("survive.max_restarts=1000", "survive.restart_window_s=36000")
CAN_STOP_S, MOST_S = 60.0, 300.0
"""Seconds in which a run has to stop, and in which what is waited for has to happen. A busy machine is slow."""
PORT, TOKEN = 29_500, "a token that no outsider knows"


def prepared(place: Path) -> str:
    """The key of the folder of prepared data, which runs in neighbouring folders share."""
    return f"data.folder={place.parent / 'datasets'}"


class Ended(SystemFailed):
    """A run has ended too early, or what was waited for did not happen. The message has the end of its output."""


@dataclass
class Run:
    """A training run in a folder, by our launcher, by torchrun, or by an agent on each host.

    Attributes:
        place: the folder in which it is started.
        launchers: the processes that have started its ranks, one for each host.
        logs: their output, and that of ranks that have failed.
    """

    place: Path
    launchers: list[subprocess.Popen[Any]]
    logs: list[Path] = field(default_factory=list)

    @classmethod
    def start(cls, place: Path, words: Sequence[str], launcher: Sequence[str] = ()) -> Run:
        """Start a run on this machine. `launcher`: in place of ours."""
        place.mkdir(exist_ok=True)
        command = [sys.executable, *(launcher or ("-m", "codescent")), "train", *SAME, prepared(place), *words]
        log, env = place / "out.txt", environment() | {"TMPDIR": str(place)}
        with log.open("ab") as out:
            process = subprocess.Popen(command, cwd=place, env=env, stdout=out, stderr=out)
            return cls(place, [process], [log])

    @classmethod
    def on_hosts(cls, made: Hosts, place: Path, words: Sequence[str]) -> Run:
        """Start a run by an agent on each host: as many ranks on each."""
        place.mkdir(exist_ok=True)
        each, env = RANKS // made.count, environment() | {"CODESCENT_TOKEN": TOKEN}
        train = [sys.executable, "-m", "codescent", "train", *SAME, prepared(place), *words]
        run = cls(place, [], [place / f"host{host}.txt" for host in range(made.count)])
        for host, path in enumerate(run.logs):
            ranks = ["--ranks", str(each), "--first", str(each * host), "--world", str(RANKS)]
            agent = [sys.executable, "-P", "-m", "codescent.launch.agent", *ranks, "--master", f"{address(0)}:{PORT}"]
            with path.open("w", encoding="utf-8") as log:
                run.launchers.append(made.start(host, [*agent, "--", *train], env, place, log))
        return run

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.place / "runs" / NAME

    @property
    def is_running(self) -> bool:
        """Whether no launcher has ended."""
        return all(process.poll() is None for process in self.launchers)

    def said(self) -> str:
        """All output."""
        return "".join(log.read_text(encoding="utf-8", errors="replace") for log in self.logs)

    def step(self) -> int:
        """The step of the last row; 0: there is none."""
        with suppress(FileNotFoundError), (self.folder / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            rows = [line for line in file.read().split(b"\n")[:-1] if line.startswith(b"{")]
            return int(json.loads(rows[-1])["step"]) if rows else 0
        return 0

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        """The events of these kinds."""
        with suppress(FileNotFoundError):
            lines = (self.folder / "events.jsonl").read_text(encoding="utf-8").splitlines()
            return [event for line in lines if line.endswith("}") and (event := json.loads(line))["kind"] in kinds]
        return []

    def ranks(self) -> list[int]:
        """Process ids of the ranks in the order of their starts, then of a spare, which is the newest."""
        with suppress(psutil.NoSuchProcess):
            found = psutil.Process(self.launchers[0].pid).children()
            return sorted(one.pid for one in found if one.status() != psutil.STATUS_ZOMBIE and "train" in one.cmdline())
        return []

    def pid_of(self, rank: int) -> int:
        """The process that was started first as this rank."""
        for pid in self.ranks():
            with suppress(psutil.Error):
                if psutil.Process(pid).environ().get("RANK") == str(rank):
                    return pid
        raise Ended(f"no process of rank {rank}")

    def has_spare(self) -> bool:
        """Whether a process waits for a place, and can take one."""
        ranks = LocalRanks(self.launchers[0].pid, RANKS)
        if (pages := ranks.pages()) is None:
            return False
        with closing(pages.memory):
            return any(pages.read(page).beat_s > 0 for page in ranks.waiting(pages.call).values())

    def places(self) -> dict[int, int]:
        """The process of each rank now. A process that waits for a place has none. Empty: the ranks meet anew."""
        ranks = LocalRanks(self.launchers[0].pid, RANKS)
        if (pages := ranks.pages()) is None:
            return {}
        with closing(pages.memory):
            call = pages.call
        found = {rank: pid for pid, rank in call.places.items()} if call.number else self._first()
        return found if {*found.values()} <= {*self.ranks()} else {}

    def _first(self) -> dict[int, int]:
        return {rank: self.pid_of(rank) for rank in range(RANKS)}

    def until(self, holds: Callable[[], object], seconds: float = MOST_S, *, runs: bool = True) -> float:
        """Seconds until something holds. Raises Ended. `runs`: it has to happen before the run has ended."""
        begin = time.perf_counter()
        while not holds():
            if (runs and not self.is_running) or time.perf_counter() - begin > seconds:
                raise Ended(self.said()[-3000:])
            time.sleep(0.005)
        return time.perf_counter() - begin

    def end(self) -> None:
        """End the run, and all that is left of it."""
        left = self.ranks()
        for process in self.launchers:
            process.send_signal(signal.SIGTERM)
        for process in self.launchers:
            with suppress(subprocess.TimeoutExpired):
                process.wait(CAN_STOP_S)
        for pid in [*left, *(process.pid for process in self.launchers)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.launchers:
            process.wait()
