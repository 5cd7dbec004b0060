"""In: words of a run with parameter servers. Out: what a worker sent to the servers, or a run with a fault in it.
Does not assert anything (test_parameter_server does) and starts no process (rank_server does)."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from typing import Any

import layout_ranks
from rank_server import Place

from codescent.train.execute import Executor
from codescent.transport import Client, Kind, Refused


def run(place: Place, words: list[str], fault: str, rank: int, resume: bool = False) -> None:
    """A run; `rank` has the fault."""
    if place.rank == rank:
        name, *arguments = fault.split()
        layout_ranks.FAULTS[name](*arguments)
    layout_ranks.run(place, words, resume)


def frames(place: Place, words: list[str]) -> list[list[Any]]:
    """A run. For each request of this rank with payloads: its kind, the server's address, bytes sent and received."""
    found: list[list[Any]] = []
    whole = Client.request

    def request(self: Client, kind: Kind, **options: Any) -> Any:
        answer = whole(self, kind, **options)
        sent = sum(payload.nbytes for payload in options.get("payloads", ()))
        if sent or answer.lengths:
            found.append([kind.name, self._name, sent, sum(answer.lengths)])
        return answer

    Client.request = request  # type: ignore[method-assign]
    with contextlib.suppress(SystemExit):
        layout_ranks.run(place, words, resume=False)
    return found


def disconnected(step: str, *servers: str) -> None:
    """Before the push of a portion of this step the connections to these servers are lost."""

    def lose(executor: Executor) -> None:
        assert executor.worker is not None
        for server in servers:
            peer = executor.worker.clients[int(server)]._peer
            assert peer is not None
            peer.shutdown(socket.SHUT_RDWR)
        time.sleep(0.3)  # so that the servers notice it before they are asked again

    layout_ranks.at_step(int(step), "_push", lose)


def stopped(step: str, seconds: str) -> None:
    """In this step the process stands still for so many seconds."""

    def stand(executor: Executor) -> None:
        wake = f"import os, time; time.sleep({seconds}); os.kill({os.getpid()}, {int(signal.SIGCONT)})"
        subprocess.Popen([sys.executable, "-c", wake])
        os.kill(os.getpid(), signal.SIGSTOP)

    layout_ranks.at_step(int(step), "_push", stand)


def hung(step: str, seconds: str) -> None:
    """In this step the process computes nothing for so many seconds; its threads and its connections live."""
    layout_ranks.at_step(int(step), "_push", lambda _: time.sleep(float(seconds)))


def killed_in_push(number: str) -> None:
    """SIGKILL before the push of that number of this rank."""
    whole, count = Executor._push, 0

    def push(self: Executor, *arguments: Any) -> None:
        nonlocal count
        count += 1
        if count == int(number):
            os.kill(os.getpid(), signal.SIGKILL)
        whole(self, *arguments)

    Executor._push = push  # type: ignore[method-assign]


layout_ranks.FAULTS |= {
    "disconnected": disconnected,
    "stopped": stopped,
    "hung": hung,
    "killed_in_push": killed_in_push,
}


def portions(place: Place, words: list[str], rank: int, seconds: float) -> dict[str, int]:
    """A run in which each forward pass takes so many seconds longer, on `rank` four times as many.

    Returns:
        How many pushes of this rank were applied, and how many were refused.
    """
    found = {"applied": 0, "refused": 0}
    whole = Client.request

    def request(self: Client, kind: Kind, **options: Any) -> Any:
        try:
            answer = whole(self, kind, **options)
        except Refused:
            found["refused"] += 1
            raise
        found["applied"] += kind is Kind.PUSH
        return answer

    Client.request = request  # type: ignore[method-assign]
    Executor._forward = layout_ranks.slowed(Executor._forward, seconds * (4 if place.rank == rank else 1))  # type: ignore[method-assign]
    with contextlib.suppress(SystemExit):
        layout_ranks.run(place, words, resume=False)
    return found
