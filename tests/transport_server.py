"""In: requests of workers. Out: a small parameter server whose weights say which portions were applied.
Does not train: the gradient of a portion is 1 at the portion's place, so each weight must become 1."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from codescent.servers import Ledger, Portion, Portions, Verdict
from codescent.transport import Answer, Client, Frame, Kind, Refused, Server, listen

KEY = b"the key of this run"
RANK = 100
"""Of the server."""
PARTS = 3
"""Portions of a step, in all tests."""


class Weights:
    """A service: one weight for each portion of work, pushes and pulls of all weights, saved after each version."""

    def __init__(self, steps: int, staleness: int | None, file: Path | None = None) -> None:
        self.lock = threading.Lock()
        self.file = file
        self.scratch: dict[int, array[float]] = {}
        self.left_because: list[tuple[int, str]] = []
        self.silent: list[int] = []  # who has left because its machine was silent
        self.order: list[tuple[int, int, int]] = []
        if file is not None and file.exists():
            saved = json.loads(file.read_text())
            self.values, self.order = array("d", saved["values"]), [tuple(one) for one in saved["order"]]
            self.ledger = Ledger.restored(saved["ledger"], life=int.from_bytes(os.urandom(4), "big"))
            self.portions = Portions.restored(saved["portions"])
        else:
            self.values = array("d", [0.0]) * (PARTS * steps)
            self.ledger, self.portions = Ledger(staleness, PARTS), Portions(PARTS, 0, steps)

    def meet(self, sender: int, facts: dict[str, Any]) -> dict[str, Any]:
        if facts.get("wire", "none") != "none":
            raise Refused(f"rank {sender} sends {facts['wire']}, the server expects none")
        with self.lock:
            return {"number": self.ledger.join(sender)}

    def into(self, request: Frame) -> Sequence[memoryview]:
        if request.lengths != (8 * len(self.values),):
            raise Refused(f"{request.lengths} bytes, not {8 * len(self.values)}")
        return [memoryview(self.scratch.setdefault(request.sender, array("d", self.values)))]

    def answer(self, request: Frame) -> Answer | None:
        with self.lock:
            return getattr(self, f"_{request.kind.name.lower()}")(request)

    def _pull(self, request: Frame) -> Answer | None:
        if self.portions.finished:
            return Answer(
                metadata={"finished": True, "order": self.order}, payloads=[memoryview(array("d", self.values))]
            )
        if (grant := self.ledger.pull(request.sender)) is None:
            return None
        self.portions.weights_given(request.sender)
        if (portion := self.portions.take(request.sender)) is None:
            self.ledger.release(request.sender)
            return None
        facts = {"ticket": grant.ticket, "step": portion.step, "part": portion.part}
        return Answer(grant.version, facts, [memoryview(array("d", self.values))])

    def _push(self, request: Frame) -> Answer | None:
        facts = request.metadata
        decision = self.ledger.push(request.sender, facts["number"], facts["ticket"])
        if decision.verdict is Verdict.WAIT:
            return None
        if decision.verdict is Verdict.APPLY:
            self.portions.done(request.sender, Portion(facts["step"], facts["part"]))
            for i, one in enumerate(self.scratch[request.sender]):
                self.values[i] += one
            self.order.append((request.sender, decision.number, decision.version))
            if self.ledger.pending == 0 and self.file is not None:
                self._save(self.file)
        return Answer(self.ledger.version, {"verdict": decision.verdict.value})

    def _ask(self, request: Frame) -> Answer | None:
        if request.metadata.get("never"):
            return None
        return Answer(metadata={"values": list(self.values), "left": self.left_because, "echo": request.metadata})

    def _save(self, file: Path) -> None:
        draft = file.with_suffix(".draft")
        state = {"ledger": self.ledger.state(), "portions": self.portions.state()}
        draft.write_text(json.dumps({"values": list(self.values), "order": self.order, **state}))
        draft.rename(file)

    def left(self, sender: int, why: str, *, silent: bool = False) -> None:
        with self.lock:
            self.ledger.release(sender)
            self.portions.leave(sender)
            self.silent += [sender] if silent else []
            self.left_because.append((sender, why))


def work(address: tuple[str, int], rank: int, pause_s: float = 0.0, stop_after: int = -1) -> list[list[int]]:
    """Be a worker until all work is finished: pull weights and a portion, compute, push. Returns the server's order.

    `stop_after`: print "computing" with this portion, and stay there for ever.
    """
    client = Client(address, KEY, rank, "server 0", timeout_s=60)
    weights, count = array("d", client.request(Kind.ASK).metadata["values"]), 0
    number = int(client.met["number"])
    while True:
        pulled = client.request(Kind.PULL, into=[memoryview(weights)])
        if pulled.metadata.get("finished"):
            client.close()
            return list(pulled.metadata["order"])
        if count == stop_after:
            print("computing", flush=True)
            threading.Event().wait()
        threading.Event().wait(pause_s)
        facts = pulled.metadata
        gradient = array("d", [0.0]) * len(weights)
        gradient[facts["step"] * PARTS + facts["part"]] = 1.0
        count, number = count + 1, number + 1
        client.request(Kind.PUSH, pulled.version, {**facts, "number": number}, [memoryview(gradient)])


def serve(listener: socket.socket, service: Weights) -> Server:
    return Server(listener, KEY, service, RANK, range(10))


def until(true: Callable[[], bool]) -> None:
    """Wait for an event; the test's own timeout ends it."""
    while not true():
        time.sleep(0.01)


if __name__ == "__main__":
    act, port = sys.argv[1], int(sys.argv[2])
    if act == "serve":
        made = serve(listen("127.0.0.1", port), Weights(int(sys.argv[3]), 1, Path(sys.argv[4])))
        print("serving", flush=True)
        threading.Event().wait()
    else:
        order = work(("127.0.0.1", port), int(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5]))
        print(json.dumps(order), flush=True)
