"""In: hosts of benchmarks/hosts.py, words of `codescent train`. Out: runs with a rank on each host, their listeners.
Does not make hosts and does not say what a run must be like: the tests that import it do."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from codescent.checkpoint.checkpoints import read_tensors
from codescent.record import RunFolder

TESTS = Path(__file__).resolve().parent
sys.path.insert(0, str(TESTS.parent / "benchmarks"))

import hosts  # noqa: E402 - found by the line above: a folder of scripts, no package

PORT = 29_500
LISTENS = "0A"
"""State of a listening socket in /proc/net/tcp."""


@dataclass
class Started:
    """A run under way.

    Attributes:
        processes: of the ranks, each on its host.
        logs: the output of each.
        run: the run folder.
        listeners: addresses and ports at which each host has listened so far.
    """

    processes: list[subprocess.Popen[str]]
    logs: list[Path]
    run: Path
    listeners: list[set[tuple[str, int]]] = field(default_factory=list)

    def said(self) -> str:
        return "".join(log.read_text(encoding="utf-8", errors="replace") for log in self.logs)

    def is_running(self) -> bool:
        return all(process.poll() is None for process in self.processes)

    def look(self) -> None:
        """Note who listens now."""
        for host, process in enumerate(self.processes):
            self.listeners[host] |= set(listeners_of(process.pid))

    def has_steps(self) -> bool:
        metrics = self.run / "metrics.csv"
        return metrics.exists() and metrics.read_bytes().count(b"\n") > 1

    def finish(self) -> RunFolder:
        """Wait for the end, and look at listeners meanwhile. All ranks must exit with 0."""
        until(lambda: not any(process.poll() is None for process in self.processes) or self.look())
        assert [process.returncode for process in self.processes] == [0] * len(self.processes), self.said()
        return RunFolder.open(self.run)


def until(happens: Callable[[], object], most_s: float = 120.0) -> None:
    end_s = time.monotonic() + most_s
    while not happens():
        assert time.monotonic() < end_s, "did not happen"
        time.sleep(0.05)


@contextmanager
def started(
    made: hosts.Hosts, ranks: int, project: Path, name: str, env: Mapping[str, str], words: Sequence[str]
) -> Iterator[Started]:
    """`codescent train run.toml` with a rank on each of the first hosts. Ranks that are left at the end are killed."""
    run = project / "runs" / name
    argv = [sys.executable, "-m", "codescent", "train", "run.toml", f"run.name={name}", *words]
    logs = [project / f"{name}-{rank}.log" for rank in range(ranks)]
    with ExitStack() as stack:
        processes = []
        for rank, path in enumerate(logs):
            log = stack.enter_context(path.open("w", encoding="utf-8"))
            variables = hosts.rank_environment(env, rank, ranks, PORT)
            processes.append(made.start(rank, argv, variables, project, log))
            stack.callback(_end, processes[-1])
        yield Started(processes, logs, run, [set() for _ in logs])


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()


def cut(made: hosts.Hosts, host: int) -> None:
    """Take the only link of a host away. Its kernel, and those of the others, are told nothing."""
    hosts._do("ip", "-n", made.name(host), "link", "set", hosts.DEVICE, "down")


def listeners_of(pid: int) -> Iterator[tuple[str, int]]:
    """Addresses and ports of the TCP listeners in the network namespace of a process; none before it is on its host."""
    with contextlib.suppress(OSError):  # the process has ended
        here = Path("/proc/self/ns/net").readlink()
        if Path(f"/proc/{pid}/ns/net").readlink() == here:
            return
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{pid}/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
                _, local, _, state, *_ = line.split()
                if state == LISTENS:
                    yield address_of(local)


def address_of(text: str) -> tuple[str, int]:
    """Address and port, of /proc/net/tcp: words of 32 bits in hexadecimal, in the byte order of the machine."""
    words, port = text.split(":")
    packed = b"".join(struct.pack("=I", int(words[at : at + 8], 16)) for at in range(0, len(words), 8))
    family = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
    return str(ipaddress.ip_address(socket.inet_ntop(family, packed))), int(port, 16)


def final_weights(run: RunFolder) -> dict[str, torch.Tensor]:
    newest = max((run.path / "checkpoints").iterdir(), key=lambda path: path.name)
    return {name: value for name, value in read_tensors(newest).items() if name.startswith("model.")}


def assert_same_weights(found: RunFolder, expected: RunFolder) -> None:
    """Bitwise."""
    tensors, others = final_weights(found), final_weights(expected)
    assert tensors.keys() == others.keys() != set()
    assert [name for name, value in tensors.items() if not torch.equal(value, others[name])] == []


def attacked(
    made: hosts.Hosts, host: int, env: Mapping[str, str], ports: Sequence[tuple[str, int]], key: bytes
) -> tuple[list[tuple[str, int]], list[dict[str, Any]]]:
    """Attack ports from a host, by tests/outsider.py. Returns those that are codescent's, and how each attack ended."""
    asked = json.dumps({"ports": ports, "key": key.hex()})
    argv = made.command(host, [sys.executable, str(TESTS / "outsider.py"), asked])
    done = subprocess.run(argv, env=dict(env), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    ours, *attacks = map(json.loads, done.stdout.splitlines())
    return [(address, port) for address, port in ours], attacks
