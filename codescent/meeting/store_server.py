"""In: a listening socket, the key of a run. Out: small values, served to peers that have proved that they know the key.
Does not carry tensors, and decides nothing about its peers (members.py does for ranks, the doctor for its own)."""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import socket
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from codescent.base.output import warn
from codescent.meeting.messages import BadMessage, receive, send
from codescent.transport.accept import Acceptor, Known
from codescent.transport.authenticate import NotProved, prove

PURPOSE = b"codescent store 2 "
"""Of the proof (transport/authenticate.py): the number is that of the messages after it."""
MOST_BYTES = 8 << 20
"""Largest request, as in torch's TCPStore."""
WHOLE_S = 5.0
"""Seconds in which a peer sends the rest of a request, or takes an answer. Others wait for it so long at most."""
MOST_STRANGERS = 512
"""Most peers that have not proved the key yet: all ranks of a large run come at the same time."""
KEEPALIVE_S = 60
"""After this many seconds without a message the kernel tests whether the other machine still answers."""
REPORTED = 3
"""Largest number of rejected peers that are reported on the standard error."""

NONSENSE = (BadMessage, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
"""What answering a request may raise, whatever bytes it has."""


class Admission(Protocol):
    """Who decides which processes are the ranks. One thread calls it."""

    def ask(self, peer: socket.socket, head: Mapping[str, Any]) -> dict[str, Any]:
        """Answer a process that asks to be a rank."""

    def left(self, peer: socket.socket, why: str) -> bool:
        """A connection has ended, and with it the process that asked on it. Returns whether all others are to be
        disconnected."""


class StoreServer:
    """Serves the values on a listening socket, in a thread of rank 0, to peers that know the key.

    Args:
        listener: the socket. The server closes it.
        key: the secret of the run.
        members: decides which processes are the ranks; None: nobody asks.
        says: whether it says that a peer has not proved the key.
    """

    def __init__(
        self, listener: socket.socket, key: bytes, members: Admission | None = None, *, says: bool = True
    ) -> None:
        self._key, self._members, self._says = key, members, says
        self._values: dict[str, bytes] = {}
        self._waiting: defaultdict[str, list[_Waiter]] = defaultdict(list)
        self._deadlines: list[_Waiter] = []
        self._selector = selectors.DefaultSelector()
        self._admitted: list[socket.socket] = []  # have proved the key; not registered for service yet
        self._nonsense = 0
        self._rejects = threading.Lock()  # strangers come at the same time
        self.rejected = Counter[str]()
        """How often a peer at an address did not prove the key."""
        acts = (self._set, self._add, self._compare_set, self._check, self._delete, self._wait, self._clock, self._meet)
        self._acts = {act.__name__[1:]: act for act in acts}
        self._wake_reader, self._wake_writer = os.pipe()
        self._wakes = threading.Lock()  # held while the pipe is written, or closed
        self._closed = False
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="codescent store", daemon=True)
        self._thread.start()
        self._acceptor = Acceptor(listener, self._admit, "codescent store accepts", MOST_STRANGERS)

    def close(self) -> None:
        """Disconnect all peers and end the threads."""
        if self._closed:
            return
        self._acceptor.close()
        with self._wakes:
            self._closed = True
            os.write(self._wake_writer, b"x")
        self._thread.join()
        with self._wakes:
            os.close(self._wake_writer)
            os.close(self._wake_reader)
        while self._admitted:
            self._admitted.pop().close()

    def _admit(self, peer: socket.socket, address: str, is_known: Known) -> None:
        """Let a peer in that proves the key. In a thread of its own: a stranger that says nothing holds nobody up."""
        try:
            prove(peer, self._key, serves=True, purpose=PURPOSE)
            keep_alive(peer)
            with self._wakes:
                if self._closed:
                    return peer.close()
                self._admitted.append(peer)
                os.write(self._wake_writer, b"x")
        except NotProved:
            peer.close()
            self._reject(address)
        except OSError:  # a probe of ports, or a rank that was cut off
            peer.close()
        finally:
            is_known()

    def _reject(self, address: str) -> None:
        with self._rejects:
            self.rejected[address] += 1
            says = self._says and self.rejected.total() <= REPORTED
        if says:
            warn(f"codescent: {address} did not prove this run's token: rejected")

    def _serve(self) -> None:
        while not self._closed:
            for ready, _ in self._selector.select(self._to_deadline_s()):
                if isinstance(ready.fileobj, socket.socket):
                    self._answer(ready.fileobj)
                else:
                    os.read(self._wake_reader, 4096)
                    while self._admitted:
                        self._selector.register(self._admitted.pop(), selectors.EVENT_READ)
            self._end_overdue()
        for registered in list(self._selector.get_map().values()):
            if isinstance(registered.fileobj, socket.socket):
                registered.fileobj.close()
        self._selector.close()

    def _answer(self, peer: socket.socket) -> None:
        if peer.fileno() < 0:  # an answer to another request has found that it has gone
            return
        try:
            head, data = receive(peer, time.monotonic() + WHOLE_S, MOST_BYTES)
            self._acts[head["do"]](peer, head, data)
        except NONSENSE as error:
            self._report(peer, error)
            self._drop(peer, error)
        except OSError as error:  # it has gone, or stands still
            self._drop(peer, error)

    def _drop(self, peer: socket.socket, error: Exception) -> None:
        if peer.fileno() < 0:  # an answer to another of its requests has found that it has gone
            return
        self._selector.unregister(peer)
        ends_all = self._members is not None and self._members.left(
            peer, getattr(error, "strerror", None) or str(error)
        )
        peer.close()
        for other in [one.fileobj for one in self._selector.get_map().values()] if ends_all else ():
            if isinstance(other, socket.socket):
                self._selector.unregister(other)
                other.close()

    def _report(self, peer: socket.socket, error: Exception) -> None:
        """Name a process of this run whose request makes no sense. Its own message says only that it lost rank 0."""
        self._nonsense += 1
        if self._nonsense <= REPORTED:
            with contextlib.suppress(OSError):  # it may have gone
                where = peer.getpeername()[0]
                warn(f"codescent: a rank at {where} sent the store a request without sense ({error!r}): disconnected")

    def _put(self, key: str, value: bytes) -> None:
        self._values[key] = value
        for waiter in self._waiting.pop(key, []):
            waiter.missing.discard(key)
            if not waiter.missing:
                self._end(waiter, {}, [self._values.get(key, b"") for key in waiter.keys])

    def _end(self, waiter: _Waiter, head: dict[str, Any], data: Sequence[bytes]) -> None:
        """Answer a peer that waits."""
        if waiter.done:
            return
        waiter.done = True
        if waiter.peer.fileno() >= 0:
            try:
                _send(waiter.peer, head, data)
            except OSError as error:  # it has gone, or has taken a part of the answer only
                self._drop(waiter.peer, error)

    def _set(self, peer: socket.socket, head: dict[str, Any], data: list[bytes]) -> None:
        self._put(head["key"], data[0])
        _send(peer, {}, [])

    def _add(self, peer: socket.socket, head: dict[str, Any], data: list[bytes]) -> None:
        total = int(self._values.get(head["key"], b"0")) + int(head["amount"])
        self._put(head["key"], str(total).encode())
        _send(peer, {"total": total}, [])

    def _compare_set(self, peer: socket.socket, head: dict[str, Any], data: list[bytes]) -> None:
        expected, wanted = data
        current = self._values.get(head["key"])
        if current == expected or (current is None and not expected):
            self._put(head["key"], wanted)
            current = wanted
        _send(peer, {}, [expected if current is None else current])

    def _check(self, peer: socket.socket, head: dict[str, Any], data: list[bytes]) -> None:
        _send(peer, {"there": [key in self._values for key in head["keys"]]}, [])

    def _delete(self, peer: socket.socket, head: dict[str, Any], data: list[bytes]) -> None:
        _send(peer, {"there": self._values.pop(head["key"], None) is not None}, [])

    def _clock(self, peer: socket.socket, head: dict[str, Any], data: list[bytes]) -> None:
        _send(peer, {"time_ns": time.time_ns()}, [])

    def _meet(self, peer: socket.socket, head: dict[str, Any], data: list[bytes]) -> None:
        if self._members is None:
            raise ValueError("the ranks of this store do not meet")
        _send(peer, self._members.ask(peer, head), [])

    def _wait(self, peer: socket.socket, head: dict[str, Any], data: list[bytes]) -> None:
        if not math.isfinite(seconds := float(head["timeout_s"])):
            raise ValueError(f"a wait of {seconds} s")
        waiter = _Waiter(peer, [str(key) for key in head["keys"]], time.monotonic() + seconds)
        waiter.missing = {key for key in waiter.keys if key not in self._values}
        for key in waiter.missing:
            self._waiting[key].append(waiter)
        if waiter.missing:
            self._deadlines.append(waiter)
        else:
            self._end(waiter, {}, [self._values[key] for key in waiter.keys])

    def _to_deadline_s(self) -> float:
        self._deadlines = [waiter for waiter in self._deadlines if not waiter.done]
        soonest = min((waiter.deadline for waiter in self._deadlines), default=math.inf)
        return min(60.0, max(0.0, soonest - time.monotonic()))

    def _end_overdue(self) -> None:
        now = time.monotonic()
        for waiter in self._deadlines:
            if waiter.deadline <= now:
                self._end(waiter, {"missing": sorted(waiter.missing)}, [])


class _Waiter:
    """A peer that waits until all `keys` have values; `deadline` is a time.monotonic()."""

    def __init__(self, peer: socket.socket, keys: list[str], deadline: float) -> None:
        self.peer, self.keys, self.deadline = peer, keys, deadline
        self.missing: set[str] = set()
        self.done = False


def keep_alive(peer: socket.socket) -> None:
    """Have the kernel test an idle connection: ranks may wait for days while data is prepared."""
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)


def _send(peer: socket.socket, head: dict[str, Any], data: Sequence[bytes]) -> None:
    send(peer, head, data, time.monotonic() + WHOLE_S)
