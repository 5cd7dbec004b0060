"""In: words of a run with parameter servers. Out: what a worker sent to the servers, or a run with a fault in it.
Does not assert anything (test_parameter_server does) and starts no process (rank_server does)."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import layout_ranks
import psutil
import torch
from rank_server import Place

from codescent.coupling.pairs import PairedReplicas
from codescent.coupling.parameter_server import WeightServer
from codescent.coupling.round_worker import RoundWorker
from codescent.coupling.server_requests import Requests
from codescent.coupling.worker import Worker
from codescent.train.execute import Executor
from codescent.transport import Answer, Client, Frame, Kind, Refused, client


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


def listeners(place: Place, words: list[str]) -> list[str]:
    """A run. The addresses at which this rank has listened at the end of a step."""
    found: set[str] = set()
    whole = Executor.launch

    def launch(self: Executor, *arguments: Any) -> Any:
        result = whole(self, *arguments)
        found.update(one.laddr.ip for one in psutil.Process().net_connections("inet") if one.status == "LISTEN")
        return result

    Executor.launch = launch  # type: ignore[method-assign]
    with contextlib.suppress(SystemExit):
        layout_ranks.run(place, words, resume=False)
    return sorted(found)


def disconnected(step: str, *servers: str) -> None:
    """Before the push of a portion of this step the connections to these servers are lost."""

    def lose(worker: Worker) -> None:
        for server in servers:
            peer = worker.clients[int(server)]._peer
            assert peer is not None
            peer.shutdown(socket.SHUT_RDWR)
        time.sleep(0.3)  # so that the servers notice it before they are asked again

    before_push(int(step), lose)


def before_push(step: int, act: Callable[[Worker], object]) -> None:
    """Act before the push of a portion of this step (from 1)."""
    whole = Worker._push

    def push(self: Worker, *arguments: Any) -> None:
        if self.step == step - 1:
            act(self)
        whole(self, *arguments)

    Worker._push = push  # type: ignore[method-assign]


def stand(seconds: str) -> None:
    """This process stands still for so many seconds: SIGSTOP, then SIGCONT."""
    wake = f"import os, time; time.sleep({seconds}); os.kill({os.getpid()}, {int(signal.SIGCONT)})"
    subprocess.Popen([sys.executable, "-c", wake])
    os.kill(os.getpid(), signal.SIGSTOP)


def stopped(step: str, seconds: str) -> None:
    """In this step the process stands still for so many seconds."""
    before_push(int(step), lambda _: stand(seconds))


def hung(step: str, seconds: str) -> None:
    """In this step the process computes nothing for so many seconds; its threads and its connections live."""
    before_push(int(step), lambda _: time.sleep(float(seconds)))


def in_push(number: int, act: Callable[[Worker], None]) -> None:
    """Act before the push of that number of this rank."""
    count = 0

    def patch(kind: type[Worker]) -> None:
        whole = kind._push

        def push(self: Worker, *arguments: Any) -> None:
            nonlocal count
            count += 1
            if count == number:
                act(self)
            whole(self, *arguments)

        kind._push = push  # type: ignore[method-assign]

    patch(Worker)
    patch(RoundWorker)


def lies(kind: str, name: str, value: str = "") -> None:
    """From the third request of this kind on, this rank sends a field with another value, in JSON; "": without it.

    A dot leads into an object. A field that a request has not is not added.
    """
    whole, count = Client.request, 0

    def request(self: Client, asked: Kind, **options: Any) -> Any:
        nonlocal count
        count += asked.name == kind
        *path, last = name.split(".")
        told = options.get("metadata", {})
        for part in path:
            told = told.get(part, {})
        if asked.name == kind and count > 2 and last in told:
            if value:
                told[last] = json.loads(value)
            else:
                del told[last]
        return whole(self, asked, **options)

    Client.request = request  # type: ignore[method-assign]


def forgets_pulls() -> None:
    """To this server every push is one of a worker that has pulled no weights."""
    whole = Requests._answer_pull

    def answer(self: Requests, request: Frame) -> Answer | None:
        found = whole(self, request)
        self.bases.pop(request.sender, None)
        return found

    Requests._answer_pull = answer  # type: ignore[method-assign]


def sends_outside(number: str) -> None:
    """From the push of that number on, its payloads name places outside of the vector."""
    whole, count = Client.request, 0

    def request(self: Client, kind: Kind, **options: Any) -> Any:
        nonlocal count
        if kind is Kind.PUSH and options.get("payloads"):
            count += 1
            if count >= int(number):
                payload = options["payloads"][0]
                payload[:] = b"\x7f" * len(payload)
        return whole(self, kind, **options)

    Client.request = request  # type: ignore[method-assign]


def poisons(number: str) -> None:
    """From the push of that number on, this rank sends gradients of NaN, with a finite loss."""
    whole, count = Worker._send, 0

    def send(self: Worker, *arguments: Any, **options: Any) -> None:
        nonlocal count
        count += 1
        if count >= int(number):
            for part in self.sent:
                part.fill_(math.nan)
        whole(self, *arguments, **options)

    Worker._send = send  # type: ignore[method-assign]


def damages(number: str, server: str = "0") -> None:
    """From the push of that number on, its gradients for a server are NaN; this rank has computed a finite norm."""
    whole, count = Worker._sent_to_all, 0

    def push(self: Worker, facts: Any, messages: Any) -> bool:
        nonlocal count
        count += 1
        if count >= int(number):
            messages[int(server)].view(torch.uint8).fill_(255)
        return whole(self, facts, messages)

    Worker._sent_to_all = push  # type: ignore[method-assign]


def loses_losses(number: str, pushes: str) -> None:
    """From the push of that number on, the loss of so many pushes of this rank is NaN; their gradients are good."""
    whole, count = Worker._sent_to_all, 0

    def push(self: Worker, facts: Any, messages: Any) -> bool:
        nonlocal count
        count += 1
        return whole(self, {**facts, "loss": math.nan} if 0 <= count - int(number) < int(pushes) else facts, messages)

    Worker._sent_to_all = push  # type: ignore[method-assign]


def forfeits(number: str) -> None:
    """The push of that number of this rank is a change of NaN, and says so."""
    whole, count = Worker._send, 0

    def send(self: Worker, facts: Any, **options: Any) -> None:
        nonlocal count
        count += 1
        if count == int(number):
            facts = {**facts, "finite": False}
            for part in self.sent:
                part.fill_(math.nan)
        whole(self, facts, **options)

    Worker._send = send  # type: ignore[method-assign]


def killed_in_push(number: str) -> None:
    """SIGKILL before the push of that number of this rank."""
    in_push(int(number), lambda _: os.kill(os.getpid(), signal.SIGKILL))


def kill_in(owner: type, method: str, number: str, *, after: bool = False) -> None:
    """SIGKILL of this process before, or after, the call of that number of a method."""
    whole, count = getattr(owner, method), 0

    def counted(self: Any, *arguments: Any) -> Any:
        nonlocal count
        count += 1
        result = whole(self, *arguments) if after or count < int(number) else None
        if count == int(number):
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, method, counted)


def killed_in_portion(number: str) -> None:
    """Asynchronous gossip: this rank has computed its portion of that number, and has not said so."""
    kill_in(PairedReplicas, "_finish", number)


def killed_after_push(number: str) -> None:
    """A server has applied so many pushes."""
    kill_in(WeightServer, "_apply", number, after=True)


def killed_in_update(number: str) -> None:
    """A server begins its update of that number."""
    kill_in(WeightServer, "_update", number)


def stopped_in_push(number: str, seconds: str) -> None:
    """Before this push the process stands still for so many seconds."""
    in_push(int(number), lambda _: stand(seconds))


def away(number: str, seconds: str) -> None:
    """As `stopped_in_push`, and the connection to the first server is lost."""

    def act(worker: Worker) -> None:
        lose_first(worker)
        stand(seconds)

    in_push(int(number), act)


def computing_long(number: str, seconds: str) -> None:
    """Before this push the connection to the first server is lost, and the rank computes on for so many seconds."""

    def act(worker: Worker) -> None:
        lose_first(worker)
        time.sleep(float(seconds))

    in_push(int(number), act)


def lose_first(worker: Worker) -> None:
    """The connection to the first server is lost."""
    peer = worker.clients[0]._peer
    assert peer is not None
    peer.shutdown(socket.SHUT_RDWR)


def deaf(every: str) -> None:
    """A server that is not the first loses its connection while every so many-th of its questions is answered: the
    first server has told it what was applied, and the answer does not arrive."""
    whole, lost = client._received, set[int]()

    def received(peer: socket.socket, request: int, end_s: float) -> Any:
        answer = whole(peer, request, end_s)
        if request and request % int(every) == 0 and request not in lost and answer.metadata["pushes"]:
            lost.add(request)
            print(f"the answer to question {request} is lost: {answer.metadata['pushes']}", flush=True)
            raise ConnectionResetError("the answer is lost")
        return answer

    client._received = received


layout_ranks.FAULTS |= {
    "away": away,
    "computing_long": computing_long,
    "deaf": deaf,
    "lies": lies,
    "poisons": poisons,
    "damages": damages,
    "forfeits": forfeits,
    "loses_losses": loses_losses,
    "forgets_pulls": forgets_pulls,
    "sends_outside": sends_outside,
    "disconnected": disconnected,
    "stopped": stopped,
    "stopped_in_push": stopped_in_push,
    "hung": hung,
    "killed_after_push": killed_after_push,
    "killed_in_push": killed_in_push,
    "killed_in_portion": killed_in_portion,
    "killed_in_update": killed_in_update,
}


def portions(
    place: Place, words: list[str], rank: int, seconds: float, ratio: float = 4.0, fault: str = ""
) -> dict[str, int]:
    """A run in which each forward pass takes so many seconds longer, on `rank` `ratio` times as many.

    `fault`: of `rank`.

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
    Executor._forward = layout_ranks.slowed(Executor._forward, seconds * (ratio if place.rank == rank else 1))  # type: ignore[method-assign]
    with contextlib.suppress(SystemExit):
        run(place, words, fault, rank if fault else -1)
    return found
