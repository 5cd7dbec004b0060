"""In: a secret key that all ranks of a run know. Out: a store of small values, for process groups and for codescent.
Does not carry tensors, and reads messages (JSON and bytes) only from a peer that has proved that it knows the key."""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import socket
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from typing import Any

from torch.distributed import DistStoreError, Store  # type: ignore[attr-defined]

from codescent.base.output import warn
from codescent.train.members import Members
from codescent.transport.authenticate import NotProved, prove

MOST_HANDSHAKES = 512
"""Largest number of peers in a handshake at one time. The server disconnects further peers; ranks then try again."""
MOST_BYTES = 8 << 20
"""Largest message, as in torch's TCPStore."""
SILENT_S = 10.0
"""Seconds that a rank waits for an answer after its deadline. Then the server has stopped, or the network is broken."""
CONNECT_S = 10.0
"""Seconds in which the server takes a further connection."""
AFTER_END_S = 0.5
"""Seconds between the end of the server and that of the process of rank 0, which has printed its error by then."""
KEEPALIVE_S = 60
"""After this many seconds without a message the kernel tests whether the other machine still answers."""
REPORTED = 3
"""Largest number of rejected peers that are reported on the standard error."""

WRONG = (EOFError, OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
"""What reading and answering a request may raise, whatever bytes it has."""

_Message = tuple[dict[str, Any], list[bytes]]


class StoreServer:
    """Serves the values on a listening socket, in a thread of rank 0, to peers that know the key.

    Each side proves that it knows the key (`_prove`).

    Args:
        listener: the socket.
        key: the secret of the run.
        members: decides which processes are the ranks; None: nobody asks.
    """

    def __init__(self, listener: socket.socket, key: bytes, members: Members | None = None) -> None:
        self._listener, self._key, self._members = listener, key, members
        self._values: dict[str, bytes] = {}
        self._waiting: defaultdict[str, list[_Waiter]] = defaultdict(list)
        self._deadlines: list[_Waiter] = []
        self._selector = selectors.DefaultSelector()
        self._accepted: list[Connection[Any, Any]] = []  # have proved the key; not registered for service yet
        self._handshakes = threading.Semaphore(MOST_HANDSHAKES)
        self._rejected = self._nonsense = 0
        acts = (self._set, self._add, self._compare_set, self._check, self._delete, self._wait, self._clock, self._meet)
        self._acts = {act.__name__[1:]: act for act in acts}
        self._wake_reader, self._wake_writer = os.pipe()
        self._wakes = threading.Lock()  # held while the pipe is written, or closed
        self._closed = False
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="codescent store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Disconnect all peers and end the thread."""
        if self._closed:
            return
        self._closed = True
        os.write(self._wake_writer, b"x")
        self._thread.join()
        with self._wakes:
            os.close(self._wake_writer)
            os.close(self._wake_reader)
        while self._accepted:
            self._accepted.pop().close()

    def _serve(self) -> None:
        while not self._closed:
            for ready, _ in self._selector.select(self._to_deadline_s()):
                if ready.fileobj is self._listener:
                    self._accept()
                elif ready.fileobj == self._wake_reader:
                    os.read(self._wake_reader, 4096)
                    while self._accepted:
                        self._selector.register(self._accepted.pop(), selectors.EVENT_READ)
                else:
                    self._answer(ready.fileobj)  # type: ignore[arg-type]
            self._end_overdue()
        for registered in list(self._selector.get_map().values()):
            if not isinstance(registered.fileobj, int):
                registered.fileobj.close()  # type: ignore[attr-defined]
        self._selector.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError, RuntimeError):  # the peer has disconnected, or no thread can be started
            peer, address = self._listener.accept()
            if self._handshakes.acquire(blocking=False):
                threading.Thread(target=self._handshake, args=(peer, address[0]), daemon=True).start()
            else:
                peer.close()

    def _handshake(self, peer: socket.socket, address: str) -> None:
        try:
            _prove(peer, self._key, serves=True)
            with self._wakes:
                if self._closed:
                    peer.close()
                    return
                self._accepted.append(Connection(peer.detach()))
                os.write(self._wake_writer, b"x")
        except (AuthenticationError, OSError):
            peer.close()
            self._rejected += 1
            if self._rejected <= REPORTED:
                print(f"codescent: {address} did not prove this run's token: rejected", file=sys.stderr, flush=True)
        finally:
            self._handshakes.release()

    def _answer(self, peer: Connection[Any, Any]) -> None:
        try:
            head, data = _parsed(peer.recv_bytes(MOST_BYTES))
            self._acts[head["do"]](peer, head, data)
        except WRONG as error:  # the peer has ended, or sent a wrong message
            self._selector.unregister(peer)
            if not isinstance(error, EOFError | OSError):
                self._report(peer, error)
            if self._members is not None:
                self._members.left(peer)
            peer.close()

    def _report(self, peer: Connection[Any, Any], error: Exception) -> None:
        """Name a process of this run whose request makes no sense. Its own message says only that it lost rank 0."""
        self._nonsense += 1
        if self._nonsense <= REPORTED:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(peer.fileno())) as again:  # it may have gone
                where = again.getpeername()[0]
                warn(f"codescent: a rank at {where} sent the store a request without sense ({error!r}): disconnected")

    def _put(self, key: str, value: bytes) -> None:
        self._values[key] = value
        for waiter in self._waiting.pop(key, []):
            waiter.missing.discard(key)
            if not waiter.missing:
                self._reply(waiter)

    def _reply(self, waiter: _Waiter) -> None:
        if not waiter.done:
            waiter.done = True
            with contextlib.suppress(OSError):  # the peer has disconnected
                _send(waiter.peer, {}, [self._values.get(key, b"") for key in waiter.keys])

    def _set(self, peer: Connection[Any, Any], head: dict[str, Any], data: list[bytes]) -> None:
        self._put(head["key"], data[0])
        _send(peer, {}, [])

    def _add(self, peer: Connection[Any, Any], head: dict[str, Any], data: list[bytes]) -> None:
        total = int(self._values.get(head["key"], b"0")) + int(head["amount"])
        self._put(head["key"], str(total).encode())
        _send(peer, {"total": total}, [])

    def _compare_set(self, peer: Connection[Any, Any], head: dict[str, Any], data: list[bytes]) -> None:
        expected, wanted = data
        current = self._values.get(head["key"])
        if current == expected or (current is None and not expected):
            self._put(head["key"], wanted)
            current = wanted
        _send(peer, {}, [expected if current is None else current])

    def _check(self, peer: Connection[Any, Any], head: dict[str, Any], data: list[bytes]) -> None:
        _send(peer, {"there": [key in self._values for key in head["keys"]]}, [])

    def _delete(self, peer: Connection[Any, Any], head: dict[str, Any], data: list[bytes]) -> None:
        _send(peer, {"there": self._values.pop(head["key"], None) is not None}, [])

    def _clock(self, peer: Connection[Any, Any], head: dict[str, Any], data: list[bytes]) -> None:
        _send(peer, {"time_ns": time.time_ns()}, [])

    def _meet(self, peer: Connection[Any, Any], head: dict[str, Any], data: list[bytes]) -> None:
        if self._members is None:
            raise ValueError("the ranks of this store do not meet")
        _send(peer, self._members.ask(peer, head), [])

    def _wait(self, peer: Connection[Any, Any], head: dict[str, Any], data: list[bytes]) -> None:
        if not math.isfinite(seconds := float(head["timeout_s"])):
            raise ValueError(f"a wait of {seconds} s")
        waiter = _Waiter(peer, [str(key) for key in head["keys"]], time.monotonic() + seconds)
        waiter.missing = {key for key in waiter.keys if key not in self._values}
        for key in waiter.missing:
            self._waiting[key].append(waiter)
        if waiter.missing:
            self._deadlines.append(waiter)
        else:
            self._reply(waiter)

    def _to_deadline_s(self) -> float:
        self._deadlines = [waiter for waiter in self._deadlines if not waiter.done]
        soonest = min((waiter.deadline for waiter in self._deadlines), default=math.inf)
        return min(60.0, max(0.0, soonest - time.monotonic()))

    def _end_overdue(self) -> None:
        now = time.monotonic()
        for waiter in self._deadlines:
            if not waiter.done and waiter.deadline <= now:
                waiter.done = True
                with contextlib.suppress(OSError):
                    _send(waiter.peer, {"missing": sorted(waiter.missing)}, [])


class _Waiter:
    """A peer that waits until all `keys` have values; `deadline` is a time.monotonic()."""

    def __init__(self, peer: Connection[Any, Any], keys: list[str], deadline: float) -> None:
        self.peer, self.keys, self.deadline = peer, keys, deadline
        self.missing: set[str] = set()
        self.done = False


class TokenStore(Store):
    """A rank's client of the server: a torch Store, for torch's process groups and for codescent.

    Each thread that waits for a value uses its own connection.

    Args:
        connect: opens a socket to the server. The server has not proved yet that it knows the key.
        key: the secret of the run.
        timeout: how long `get` and `wait` wait.

    Raises:
        AuthenticationError: the server does not know the key.
        OSError: no server answers.
    """

    def __init__(self, connect: Callable[[], socket.socket], key: bytes, timeout: timedelta) -> None:
        super().__init__()
        self._connect, self._key, self._timeout = connect, key, timeout
        self._idle: list[Connection[Any, Any]] = []
        self._clones: list[TokenStore] = []  # references to the Python objects: torch holds only their C++ part
        self._idle.append(self._connected())

    @property
    def timeout(self) -> timedelta:
        """How long `get` and `wait` wait."""
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long `get` and `wait` wait."""
        self._timeout = timeout

    def clone(self) -> TokenStore:
        """Another client of the same server."""
        self._clones.append(TokenStore(self._connect, self._key, self._timeout))
        return self._clones[-1]

    def set(self, key: str, value: str | bytes) -> None:
        """Set a value."""
        self._ask({"do": "set", "key": key}, [_bytes(value)])

    def get(self, key: str) -> bytes:
        """Wait for a value and return it. Raises DistStoreError: it was not set within the timeout."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait for all values and return them. Raises DistStoreError: one was not set within the timeout."""
        return self._waited(keys, self._timeout)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys have values. Raises DistStoreError: one was not set within the timeout."""
        self._waited(keys, timeout or self._timeout)

    def add(self, key: str, amount: int) -> int:
        """Add `amount` to a number that begins at 0, and return the sum."""
        return int(self._ask({"do": "add", "key": key, "amount": amount}, [])[0]["total"])

    def compare_set(self, key: str, expected: str | bytes, wanted: str | bytes) -> bytes:
        """Set the value if it equals `expected` (b"": has no value yet). Returns the value after the call."""
        return self._ask({"do": "compare_set", "key": key}, [_bytes(expected), _bytes(wanted)])[1][0]

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys have values."""
        return all(self.there(keys))

    def there(self, keys: Sequence[str]) -> list[bool]:
        """For each key, whether it has a value."""
        return list(self._ask({"do": "check", "keys": list(keys)}, [])[0]["there"])

    def delete_key(self, key: str) -> bool:
        """Remove a value. Returns whether there was one."""
        return bool(self._ask({"do": "delete", "key": key}, [])[0]["there"])

    deleteKey = delete_key

    def clock(self) -> int:
        """The time of the server's clock, in nanoseconds since 1970."""
        return int(self._ask({"do": "clock"}, [])[0]["time_ns"])

    def meet(self, about: Mapping[str, Any]) -> dict[str, Any]:
        """Ask to be one of the ranks: see `Members.ask`."""
        return self._ask({"do": "meet", **about}, [])[0]

    def stay(self) -> None:
        """From now on connect to this server alone, wherever rank 0 of a later start listens."""
        where = self._idle[-1]
        with socket.socket(fileno=os.dup(where.fileno())) as again:
            server = again.getpeername()[:2]
        self._connect = lambda: socket.create_connection(server, timeout=CONNECT_S)

    def wait_for_end(self, seconds: float) -> None:
        """Wait until the server has ended, or so many seconds. All ranks have an error then, which rank 0 prints."""
        end_s = time.monotonic() + seconds
        with contextlib.suppress(DistStoreError):
            while time.monotonic() < end_s:
                self.check([""])
                time.sleep(0.05)
        time.sleep(AFTER_END_S)

    def address(self) -> str:
        """The address of this machine from which it has connected to the server."""
        connection = self._idle[-1]
        with socket.socket(fileno=os.dup(connection.fileno())) as again:
            return str(again.getsockname()[0])

    def close(self) -> None:
        """Close all connections to the server."""
        for store in (self, *self._clones):
            while store._idle:
                store._idle.pop().close()

    def _waited(self, keys: Sequence[str], timeout: timedelta) -> list[bytes]:
        seconds = timeout.total_seconds()
        head, values = self._ask({"do": "wait", "keys": list(keys), "timeout_s": seconds}, [], seconds)
        if missing := head.get("missing"):
            raise DistStoreError(f"not set after {seconds:g} s: {', '.join(missing)}")
        return values

    def _ask(self, head: dict[str, Any], data: list[bytes], wait_s: float = 0.0) -> tuple[dict[str, Any], list[bytes]]:
        """Send a request and return the answer. Raises DistStoreError: the server has ended, or does not answer."""
        wait_s = max(wait_s, self._timeout.total_seconds()) + SILENT_S
        connection: Connection[Any, Any] | None = None
        try:
            try:
                connection = self._idle.pop()
            except IndexError:
                connection = self._connected()
            _send(connection, head, data)
            if not connection.poll(wait_s):
                raise TimeoutError(f"no answer for {wait_s:g} s")
            answer = _parsed(connection.recv_bytes())
        except (AuthenticationError, EOFError, OSError) as error:
            if connection is not None:
                connection.close()
            raise DistStoreError(f"rank 0, which serves the store of all ranks, does not answer ({error!r})") from error
        self._idle.append(connection)
        return answer

    def _connected(self) -> Connection[Any, Any]:
        """Open a connection. Raises AuthenticationError: the server does not know the key; OSError: none answers."""
        peer = self._connect()
        try:
            _prove(peer, self._key, serves=False)
        except BaseException:
            peer.close()
            raise
        return Connection(peer.detach())


def _prove(peer: socket.socket, key: bytes, *, serves: bool) -> None:
    """Prove to the other side that this process knows the key, and check that it does: see transport/authenticate.py.

    Raises:
        AuthenticationError: the other side does not know the key.
        OSError: the other side has disconnected, or has not finished in time.
    """
    try:
        prove(peer, key, serves=serves, purpose=b"codescent store 1 ")
    except NotProved as error:
        raise AuthenticationError("another key") from error
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # ranks may wait for days while data is prepared
    if hasattr(socket, "TCP_KEEPIDLE"):
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _send(connection: Connection[Any, Any], head: dict[str, Any], data: Sequence[bytes]) -> None:
    """Send one line of JSON, then the bytes of `data`. The line has the sizes of the data."""
    line = json.dumps(head | {"sizes": [len(one) for one in data]}).encode()
    connection.send_bytes(b"".join((line, b"\n", *data)))


def _parsed(message: bytes) -> _Message:
    line, _, rest = message.partition(b"\n")
    head: dict[str, Any] = json.loads(line)
    data, start = [], 0
    for size in head["sizes"]:
        data.append(rest[start : start + size])
        start += size
    return head, data
