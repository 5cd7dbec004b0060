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
    """A run with an agent and a rank on each host. Its end kills what is left."""

    def __init__(self, made: hosts.Hosts, count: int, folder: Path, name: str, *words: str) -> None:
        self.run, self.logs = folder / "runs" / name, [folder / f"{name}-{host}.log" for host in range(count)]
        train_words = [sys.executable, "-m", "codescent", "train", "run.toml", f"run.name={name}", *words]
        self._stack = ExitStack()
        self.agents: list[subprocess.Popen[str]] = []
        for host, path in enumerate(self.logs):
            place = ["--ranks", "1", "--first", str(host), "--world", str(count)]
            agent = [sys.executable, "-P", "-m", "codescent.launch.agent", *place, "--master", "10.77.0.1:29500"]
            log = self._stack.enter_context(path.open("w", encoding="utf-8"))
            env = environment(CODESCENT_TOKEN=TOKEN)
            self.agents.append(made.start(host, [*agent, "--", *train_words], env, folder, log))

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
