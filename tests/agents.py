"""In: a folder, a policy. Out: a run of two agents, as on two hosts, whose ranks and agents can be killed.
Both are on this machine, at loopback. Does not decide what is tested: tests/faults/ does."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from runs import environment, make_project
from surviving import SLOW_STEPS, WORDS

from codescent.record import RunFolder

FP64 = ("train.precision=fp64", "model.num_heads=2", "model.num_layers=2")


class Agents:
    """A run on two hosts with two ranks each, unless `count` says otherwise.

    Attributes:
        hosts: the agent of each host, by number.
        said: a file for each start of an agent, with all that it printed.
    """

    def __init__(
        self, place: Path, on_loss: str, *words: str, count: int = 2, spares: tuple[int, int] = (0, 0)
    ) -> None:
        make_project(place)
        (place / "own_logger.py").write_text(SLOW_STEPS)
        self.place, self.folder, self.count, self.spares = place, place / "runs" / "a", count, spares
        # as a script does: below the ports that connections take while the agents start
        self.on_loss, self.master = on_loss, f"127.0.0.1:{20_000 + secrets.randbelow(10_000)}"
        given = ["run.name=a", "log.to=own_logger:slow", f"survive.on_loss={on_loss}", *FP64, *words]
        self.command = [sys.executable, "-P", "-m", "codescent", "train", *WORDS, *given, "--resume=auto"]
        self.said: list[Path] = []
        self.hosts = [self.start(host) for host in range(2)]

    def start(self, host: int) -> subprocess.Popen[str]:
        """Start the agent of a host, as its script does."""
        self.said.append(self.place / f"said-{len(self.said)}")
        words = ["--follow", "--ranks", str(self.count), "--first", str(host * self.count)]
        words += ["--world", str(2 * self.count), "--master", self.master]
        words += ["--on-loss", self.on_loss, "--max-restarts", "9", "--spares", str(self.spares[host])]
        with self.said[-1].open("w") as out:
            agent = subprocess.Popen(
                [sys.executable, "-P", "-m", "codescent.launch.agent", *words, "--", *self.command],
                cwd=self.place,
                env=environment(GLOO_SOCKET_IFNAME="lo"),
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
                text=True,
            )
        assert agent.stdin is not None
        agent.stdin.write("a secret\n")
        agent.stdin.flush()
        return agent

    def rows(self) -> int:
        """The rows of metrics so far."""
        file = self.folder / "metrics.jsonl"
        return file.read_bytes().count(b"\n") if file.exists() else 0

    def until(self, holds: Callable[[], bool]) -> None:
        """Wait until something holds, while host 0 goes on."""
        while not holds():
            assert self.hosts[0].poll() is None, self.all_said()
            time.sleep(0.01)

    def pids(self, host: int) -> list[int]:
        """The processes that the agent of a host has started, the oldest first."""
        words = ["pgrep", "-P", str(self.hosts[host].pid), "-f", "codescent train"]
        return [*map(int, subprocess.run(words, capture_output=True, text=True, check=False).stdout.split())]

    def kill(self, host: int, number: int = 0) -> None:
        """Kill the n-th process of a host."""
        os.kill(self.pids(host)[number], signal.SIGKILL)

    def lose(self, host: int) -> None:
        """Kill the agent of a host, and with it all that it has started."""
        self.hosts[host].kill()
        self.hosts[host].wait()

    def events(self, kind: str) -> list[dict[str, object]]:
        """The events of a kind."""
        found = RunFolder.open(self.folder).read_events() if (self.folder / "config.toml").exists() else []
        return [dict(event) for event in found if event["kind"] == kind]

    def all_said(self) -> str:
        """What all agents have printed."""
        return "\n".join(f"== {path.name}\n{path.read_text()}" for path in self.said)

    def end(self, within_s: float = 120.0) -> list[int]:
        """The exit code of each agent."""
        (self.place / "fast").touch()
        end_s = time.monotonic() + within_s
        while any(one.poll() is None for one in self.hosts):
            assert time.monotonic() < end_s, self.all_said()
            time.sleep(0.05)
        return [one.returncode for one in self.hosts]

    def close(self) -> None:
        """End what a test has left."""
        for agent in self.hosts:
            agent.kill()
            agent.wait()
