"""In: hosts of benchmarks/hosts.py, words of `codescent train`. Out: a run with our agent and a rank on each host.
Does not make hosts and does not say what a run must be like: the tests that import it do."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import host_ranks
from host_ranks import hosts
from runs import environment

TOKEN = "a token that no outsider knows"
LONG = ("train.num_steps=1000000", "optimizer.decay_steps=100", "train.eval_every=0", "log.metrics_every=1")
"""A run that does not end by itself."""


class Agents:
    """A run with an agent and a rank on each host. Its end kills what is left. `on_loss`: survive.on_loss."""

    def __init__(
        self, made: hosts.Hosts, count: int, folder: Path, name: str, *words: str, on_loss: str = "stop"
    ) -> None:
        self.run, self.logs = folder / "runs" / name, [folder / f"{name}-{host}.log" for host in range(count)]
        self._made, self._folder, self._stack = made, folder, ExitStack()
        self._survives = [] if on_loss == "stop" else ["--on-loss", on_loss, "--max-restarts", "9"]
        resume = ["--resume=auto"] if self._survives else []
        self._train = ["train", "run.toml", f"run.name={name}", f"survive.on_loss={on_loss}", *words, *resume]
        self.agents = [self.start(host) for host in range(count)]

    def start(self, host: int) -> subprocess.Popen[str]:
        """Start the agent of a host, as the script of a run does."""
        place = ["--ranks", "1", "--first", str(host), "--world", str(len(self.logs)), "--master", "10.77.0.1:29500"]
        agent = [sys.executable, "-P", "-m", "codescent.launch.agent", *place, *self._survives, "--"]
        log = self._stack.enter_context(self.logs[host].open("a", encoding="utf-8"))
        command = [*agent, sys.executable, "-m", "codescent", *self._train]
        return self._made.start(host, command, environment(CODESCENT_TOKEN=TOKEN), self._folder, log)

    def __enter__(self) -> Agents:
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self.agents:
            agent.kill()
            agent.wait()
        self._stack.close()

    def steps(self, count: int) -> None:
        """Wait until so many steps are done."""
        csv = self.run / "metrics.csv"

        def done() -> bool:
            assert not [agent for agent in self.agents if agent.poll() is not None], self.said()
            return csv.exists() and csv.read_text().count("\n") > count

        host_ranks.until(done)

    def end(self, most_s: float = 120.0) -> list[int | None]:
        """The exit codes, when all agents have ended."""
        host_ranks.until(lambda: all(agent.poll() is not None for agent in self.agents), most_s)
        return [agent.returncode for agent in self.agents]

    def said(self) -> str:
        return "".join(f"--- {log.name}\n{log.read_text(errors='replace')}" for log in self.logs)
