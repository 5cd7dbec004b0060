"""In: reports of the agents of all hosts of a run. Out: orders for each; which host has come, has gone, or is silent.
Does not decide what follows (decider.py does) and starts no process. Agents ask again and again: no message is lost."""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from codescent.base.errors import RunFailed, UserError
from codescent.launch.decider import Decider
from codescent.launch.reports import HostPlace, HostReport, Orders
from codescent.meeting.store import StoreError
from codescent.meeting.store_client import StoreClient
from codescent.meeting.store_server import NONSENSE, StoreServer
from codescent.transport.authenticate import NotProved

RUN = "agents"
"""Of the key of the run, for these messages."""
EVERY_S = 0.1
"""Seconds between two reports of a host."""
ALONE_S, SILENT_S = 10.0, 12.0
"""An agent that hears nothing for so long ends its ranks. A host that says nothing for so long is lost: it is later, so
that ranks of a host that was cut off have ended when the others meet."""
AGAIN_S = 2.0
"""An agent whose connection has ended has so long for another one."""
COME_S = 300.0
"""So long an agent looks for that of host 0: a script may start that one later."""
ANSWER_S, CLOSE_S = 2.0, 5.0
"""Seconds in which host 0 answers; in which the others hear that the run is over."""


@dataclass
class _Seat:
    """The agent of a host, as host 0 sees it.

    Attributes:
        session: a fresh number of the agent: one that is started again is another agent.
        place: what it has brought.
        peer: its connection.
        heard_s: when it has asked last.
        report: what it has said last.
        left_s: since when it has no connection; None: it has one.
        answer: what it is told now.
        is_known: the decider knows of it.
        is_told: it has heard `answer`.
    """

    session: str
    place: HostPlace
    peer: object
    heard_s: float
    report: HostReport
    left_s: float | None = None
    answer: dict[str, Any] | None = None
    is_known: bool = False
    is_told: bool = False

    def lives(self, now_s: float) -> bool:
        """Whether it keeps its place: it has a connection, and asks. A host without power ends no connection."""
        return self.left_s is None and now_s - self.heard_s <= SILENT_S


LOST = Orders(
    over="host 0 has taken this host for lost: its ranks end, and others go on; started again, it may join them",
    code=RunFailed.exit_code,
    kills=True,
)


def _refused(host: int, place: HostPlace, other: str) -> Orders:
    """What an agent is told whose ranks another one has."""
    return Orders(
        over=f"--first {host} --ranks {place.count}: the agent of {other} has some of these ranks, or all",
        code=UserError.exit_code,
        kills=True,
    )


class AgentHub:
    """Host 0: the agents of the other hosts report here, and get their orders.

    Args:
        decider: of the run. Only `exchange` and `close` change it; the server's thread reads places and names.
        listener: a socket, where the other agents look for this one.
        key: of the run.
        store_port: where rank 0 serves the store.
    """

    every_s, port = EVERY_S, 0

    def __init__(self, decider: Decider, listener: socket.socket, key: bytes, store_port: int) -> None:
        self._decider, self._store_port = decider, store_port
        self._seats: dict[int, _Seat] = {}
        self._past: set[str] = set()  # sessions of agents that others have replaced
        self._asked_s: dict[str, float] = {}  # since when an agent asks for the place of another one
        self._lock = threading.Lock()
        self._server = StoreServer(listener, key, self)

    def ask(self, peer: object, head: Mapping[str, Any]) -> dict[str, Any]:
        """An agent reports. Returns its orders; nothing: it asks again."""
        host, session, now_s = int(head["host"]), str(head["session"]), time.monotonic()
        report, place = HostReport.of(head["report"]), HostPlace(**head["place"])
        if not 0 < host <= self._decider.places.wanted - place.count:
            raise ValueError(f"{place.count} ranks from {host} on")
        with self._lock:
            if session in self._past:
                return self._answer(LOST)
            if other := self._overlaps(host, place, now_s):
                return self._answer(_refused(host, place, other))
            seat = self._seats.get(host)
            if seat is None or (seat.session != session and not seat.lives(now_s)):
                self._past |= set() if seat is None else {seat.session}
                self._asked_s.pop(session, None)
                seat = self._seats[host] = _Seat(session, place, peer, now_s, report)
            if seat.session != session:  # that of before may still live
                since_s = self._asked_s.setdefault(session, now_s)
                is_over = now_s - since_s > SILENT_S + AGAIN_S
                return self._answer(_refused(host, place, seat.place.name)) if is_over else {}
            seat.peer, seat.heard_s, seat.report, seat.left_s = peer, now_s, report, None
            seat.is_told = seat.answer is not None
            return seat.answer or {}

    def _overlaps(self, host: int, place: HostPlace, now_s: float) -> str:
        """The name of another host with ranks of these; "": there is none."""
        if self._decider.places.host_of(host) == 0:
            return self._decider.name(0)
        return next(
            (
                seat.place.name
                for first, seat in self._seats.items()
                if seat.lives(now_s)
                and first != host
                and first < host + place.count
                and host < first + seat.place.count
            ),
            "",
        )

    def left(self, peer: object, why: str) -> bool:
        """A connection has ended."""
        with self._lock:
            for seat in self._seats.values():
                if seat.peer is peer and seat.left_s is None:
                    seat.left_s = time.monotonic()
        return False

    def exchange(self, report: HostReport) -> Orders:
        """Say what the processes of this host do. Returns what it does now."""
        decider, now_s = self._decider, time.monotonic()
        with self._lock:
            seats = {**self._seats}
        for host, seat in seats.items():
            if not seat.is_known:
                decider.join(host, seat.place)
                seat.is_known = True
            decider.hear(host, seat.report)
            if seat.left_s is not None and now_s - seat.left_s > AGAIN_S:
                decider.lose(host, "its agent has ended")
            elif now_s - seat.heard_s > SILENT_S:
                seat.left_s = seat.left_s or seat.heard_s  # another agent may take its place
                decider.lose(host, f"it was silent for {SILENT_S:g} s")
        decider.hear(0, report)
        decider.look()
        self._publish(seats)
        return decider.orders([0])[0]

    def close(self) -> None:
        """The ranks of this host have ended: tell the others that the run is over."""
        self._decider.finish()
        with self._lock:
            seats = {**self._seats}
            self._publish(seats)
            for seat in seats.values():
                seat.is_told = False
        end_s = time.monotonic() + CLOSE_S
        while (now_s := time.monotonic()) < end_s and any(
            not one.is_told and one.lives(now_s) for one in seats.values()
        ):
            time.sleep(EVERY_S)
        self._server.close()

    def _publish(self, seats: Mapping[int, _Seat]) -> None:
        orders = self._decider.orders(seats)
        for host, seat in seats.items():
            seat.answer = self._answer(LOST if self._decider.is_lost(host) else orders[host])

    def _answer(self, orders: Orders) -> dict[str, Any]:
        return {"orders": orders.to_json(), "port": self._store_port}


class Follower:
    """Another host: reports to host 0, and does what that decides.

    Args:
        host: its first rank.
        place: what it brings.
        connect: opens a connection to the agent of host 0.
        key: of the run.
    """

    every_s = EVERY_S

    def __init__(self, host: int, place: HostPlace, connect: Callable[[], socket.socket], key: bytes) -> None:
        self._head = {"host": host, "session": secrets.token_hex(16), "place": place.to_json()}
        self._connect, self._key = connect, key
        self._report, self._orders = HostReport(), Orders()
        self.port = 0  # where rank 0 serves the store; 0: not known yet
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._heard_s, self._limit_s, self._why = time.monotonic(), COME_S, ""
        self._thread = threading.Thread(target=self._follow, name="codescent agent", daemon=True)
        self._thread.start()

    def exchange(self, report: HostReport) -> Orders:
        """Say what the processes of this host do. Returns what it does now."""
        with self._lock:
            self._report = report
            orders, silent_s = self._orders, time.monotonic() - self._heard_s
            if silent_s > self._limit_s and not (orders.over or orders.done):
                said = f"the agent of host 0, which has rank 0, has not answered for {silent_s:.0f} s{self._why}"
                over = f"the run ends here: {said}"
                self._orders = orders = Orders(over=over, code=RunFailed.exit_code, kills=True)
            return orders

    def close(self) -> None:
        """The ranks of this host have ended."""
        self._closed.set()
        self._thread.join(ANSWER_S)

    def _follow(self) -> None:
        while not self._closed.is_set():
            try:
                client = StoreClient(self._connect, self._key, timedelta(seconds=ANSWER_S))
                try:
                    self._ask(client)
                finally:
                    client.close()
            except (StoreError, OSError, NotProved, UserError, *NONSENSE) as error:
                self._why = f" ({error})"
                self._closed.wait(EVERY_S)

    def _ask(self, client: StoreClient) -> None:
        """Report and read orders, until this host has ended. Its last report comes after its end."""
        while True:
            is_last = self._closed.is_set()
            with self._lock:
                report = self._report
            answer = client.meet({**self._head, "report": report.to_json()})
            with self._lock:
                self._heard_s = time.monotonic()
                if "orders" in answer and not self._orders.over:
                    self._orders, self.port = Orders.of(answer["orders"]), int(answer["port"])
                    self._limit_s = ALONE_S
            if is_last:
                return
            self._closed.wait(EVERY_S)
