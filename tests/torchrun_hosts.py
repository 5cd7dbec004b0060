"""In: hosts of benchmarks/hosts.py, a script. Out: real agents of torchrun on them, their ranks, and who listens where.
Does not say what must happen: the tests that import it do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from host_ranks import LISTENS, address_of
from runs import environment

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import hosts

PORT = 29_400
TOKEN = "a token that no outsider knows"
SCRIPT = """
import json, os, sys, time
import codescent

with codescent.init("cpu", timeout_s=60, meet_s=60, listen=os.environ.get("LISTEN")) as ranks:
    step = 0
    while True:
        step += 1
        total = ranks.mean(ranks.rank) * ranks.world_size
        assert total == ranks.world_size * (ranks.world_size - 1) / 2, total
        with open(f"at{ranks.rank}.new", "w") as file:
            json.dump([os.getpid(), os.getppid(), ranks.world_size, step, os.uname().nodename], file)
        os.replace(f"at{ranks.rank}.new", f"at{ranks.rank}")
        time.sleep(0.02)
        if ranks.mean(os.path.exists("stop")):
            break
"""
"""An own loop. Each rank writes its process id, its parent's, the number of ranks, its steps and its host. All stop in
the same step, once one has seen the file `stop`."""


@dataclass(frozen=True)
class At:
    """A rank that trains."""

    rank: int
    pid: int
    agent: int
    ranks: int
    step: int
    host: str


class Nodes:
    """A job of torchrun whose nodes are hosts. Its end kills what is left of it.

    Args:
        made: the hosts.
        folder: where the agents run.
        stock: whether the hosts have stock names: each has the same, and it means loopback.
    """

    def __init__(self, made: hosts.Hosts, folder: Path, *, stock: bool = False) -> None:
        self.made, self.folder, self._stack = made, folder, ExitStack()
        self.agents: dict[int, subprocess.Popen[str]] = {}
        self._hosts: Path | None = None
        if stock:
            self._hosts = folder / "hosts"
            self._hosts.write_text("127.0.0.1 localhost\n127.0.1.1 vm\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for host in list(self.agents):
            self.kill(host)
        self._stack.close()

    def command(self, host: int, argv: Sequence[str]) -> list[str]:
        """The command line that runs `argv` on a host."""
        if self._hosts is None:
            return self.made.command(host, argv)
        names = 'hostname vm && mount --bind "$0" /etc/hosts && exec "$@"'
        inside = ["unshare", "--uts", "--mount", "--propagation", "private", "sh", "-c", names, str(self._hosts), *argv]
        return ["nsenter", f"--net=/run/netns/{self.made.name(host)}", "--", *inside]

    def start(self, host: int, *words: str, program: Sequence[str] = ("loop.py",), **env: str) -> None:
        """Start the agent of a host, with one rank unless `words` say otherwise."""
        argv = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1", *words, *program]
        self.agents[host] = self._started(host, argv, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **env})

    def run(self, host: int, env: dict[str, str], script: str = "loop.py") -> None:
        """Start a rank of a host without an agent; it is one of `agents` all the same."""
        self.agents[host] = self._started(host, [sys.executable, script], env)

    def _started(self, host: int, argv: Sequence[str], env: dict[str, str]) -> subprocess.Popen[str]:
        log = self._stack.enter_context((self.folder / f"host{host}.log").open("a"))
        return subprocess.Popen(
            self.command(host, argv), cwd=self.folder, env=environment(CODESCENT_TOKEN=TOKEN, **env), text=True,
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip

    def kill(self, host: int) -> None:
        """Kill all of a host: the agent and its ranks."""
        agent = self.agents.pop(host)
        for pid in [*children(agent.pid), agent.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        agent.wait()

    def said(self) -> str:
        return "".join(
            f"--- {log.name}\n{log.read_text(errors='replace')}" for log in sorted(self.folder.glob("*.log"))
        )

    def at(self, rank: int) -> At | None:
        """Where a rank is; None: it has taken no step."""
        with suppress(OSError, ValueError):
            return At(rank, *json.loads((self.folder / f"at{rank}").read_text()))
        return None

    def train(self, ranks: int, other_than: Sequence[int] = (), most_s: float = 90.0) -> list[At]:
        """Wait until so many ranks train together, as processes that are not in `other_than`."""
        found: list[At] = []

        def trains() -> bool:
            here = [self.at(rank) for rank in range(ranks)]
            found[:] = [one for one in here if one and one.ranks == ranks and one.pid not in other_than]
            return len(found) == ranks and all(Path(f"/proc/{one.pid}").exists() for one in found)

        self.until(trains, most_s)
        return found

    def until(self, happens: Callable[[], object], most_s: float = 90.0) -> None:
        end_s = time.monotonic() + most_s
        while not happens():
            assert time.monotonic() < end_s, self.said()[-8000:]
            time.sleep(0.1)

    def stop(self) -> list[int]:
        """Have the ranks end well. The exit codes of the agents."""
        (self.folder / "stop").touch()
        return self.finish()

    def finish(self, most_s: float = 90.0) -> list[int]:
        """Wait for the agents. Their exit codes."""
        codes = []
        for agent in self.agents.values():
            try:
                codes.append(agent.wait(most_s))
            except subprocess.TimeoutExpired:
                raise AssertionError(self.said()[-8000:]) from None
        self.agents.clear()
        return codes


def children(pid: int) -> list[int]:
    """The processes that a process has started, and those that these have."""
    found = []
    with suppress(OSError):
        for one in Path(f"/proc/{pid}/task").iterdir():
            found += [int(word) for word in (one / "children").read_text().split()]
    return [*found, *(later for one in found for later in children(one))]


def listeners_of_process(pid: int) -> Iterator[tuple[str, int]]:
    """The addresses and ports at which one process listens."""
    mine = set()
    for one in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            mine.add(str(one.readlink()))
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == LISTENS and f"socket:[{inode}]" in mine:
                yield address_of(local)
