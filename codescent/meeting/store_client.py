"""In: a way to the store's server, the key of a run. Out: the values of all ranks, and rank 0's answers to this rank.
Plain Python; train/torch_store.py makes it a store of torch. Does not serve (store_server.py does)."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from codescent.meeting.messages import Message, receive, send
from codescent.meeting.store import NotSet, Store, StoreError, as_bytes, not_set
from codescent.meeting.store_server import PURPOSE, keep_alive
from codescent.transport.authenticate import prove

SILENT_S = 10.0
"""Seconds that a rank waits for an answer after its deadline. Then the server has stopped, or the network is broken."""
CONNECT_S = 10.0
"""Seconds in which the server takes a further connection."""
AGAIN_S = 0.1
AFTER_END_S = 0.5
"""Seconds between the end of the server and that of the process of rank 0, which has printed its error by then."""


class StoreClient(Store):
    """A rank's client of the server. Each thread that waits for a value uses its own connection.

    Args:
        connect: opens the first socket to the server, which has not proved yet that it knows the key. Later ones go
            to this server alone, wherever rank 0 of a later start listens.
        key: the secret of the run.
        timeout: how long `get` and `wait` wait.
        watch: tells the kernel when to give up a connection of this client.

    Raises:
        NotProved: the server does not know the key.
        OSError: no server answers.
    """

    def __init__(
        self,
        connect: Callable[[], socket.socket],
        key: bytes,
        timeout: timedelta,
        watch: Callable[[socket.socket], None] = keep_alive,
    ) -> None:
        self._connect, self._key, self.timeout, self._watch = connect, key, timeout, watch
        self._clones: list[StoreClient] = []
        self._idle = [self._connected()]
        server = self._idle[0].getpeername()[:2]
        self._connect = lambda: socket.create_connection(server, timeout=CONNECT_S)

    def clone(self) -> StoreClient:
        """See Store."""
        try:
            self._clones.append(StoreClient(self._connect, self._key, self.timeout, self._watch))
        except OSError as error:
            raise self._lost(None, repr(error)) from error
        return self._clones[-1]

    def set(self, key: str, value: str | bytes) -> None:
        """See Store."""
        self._ask({"do": "set", "key": key}, [as_bytes(value)])

    def add(self, key: str, amount: int) -> int:
        """See Store."""
        return int(self._ask({"do": "add", "key": key, "amount": amount})[0]["total"])

    def compare_set(self, key: str, expected: str | bytes, wanted: str | bytes) -> bytes:
        """See Store."""
        return self._ask({"do": "compare_set", "key": key}, [as_bytes(expected), as_bytes(wanted)])[1][0]

    def there(self, keys: Sequence[str]) -> list[bool]:
        """See Store."""
        return list(self._ask({"do": "check", "keys": list(keys)})[0]["there"])

    def delete_key(self, key: str) -> bool:
        """See Store."""
        return bool(self._ask({"do": "delete", "key": key})[0]["there"])

    def clock(self) -> int:
        """See Store."""
        return int(self._ask({"do": "clock"})[0]["time_ns"])

    def meet(self, about: Mapping[str, Any]) -> dict[str, Any]:
        """Ask to be one of the ranks: see `Members.ask`."""
        return self._ask({"do": "meet", **about})[0]

    def wait_for_end(self, seconds: float) -> None:
        """See Store."""
        end_s = time.monotonic() + seconds
        with contextlib.suppress(StoreError):
            while time.monotonic() < end_s:
                self.check([""])
                time.sleep(0.05)
        time.sleep(AFTER_END_S)

    def address(self) -> str:
        """The address of this machine from which it has connected to the server."""
        return str(self._idle[-1].getsockname()[0])

    def close(self) -> None:
        """See Store."""
        for store in (self, *self._clones):
            while store._idle:
                store._idle.pop().close()

    def waited(self, keys: Sequence[str], timeout: timedelta) -> list[bytes]:
        """See Store."""
        seconds = timeout.total_seconds()
        head, values = self._ask({"do": "wait", "keys": list(keys), "timeout_s": seconds}, wait_s=seconds)
        if missing := head.get("missing"):
            raise NotSet(not_set(timeout, missing))
        return values

    def _ask(self, head: dict[str, Any], data: Sequence[bytes] = (), wait_s: float = 0.0) -> Message:
        """Send a request and return the answer. Raises StoreError: the server has ended, or does not answer."""
        wait_s = max(wait_s, self.timeout.total_seconds()) + SILENT_S
        connection: socket.socket | None = None
        try:
            try:
                connection = self._idle.pop()
            except IndexError:
                connection = self._further()
            end_s = time.monotonic() + wait_s
            send(connection, head, data, end_s)
            answer = receive(connection, end_s)
        except TimeoutError as error:
            raise self._lost(connection, f"no answer for {wait_s:g} s") from error
        except OSError as error:
            raise self._lost(connection, repr(error)) from error
        self._idle.append(connection)
        return answer

    def _lost(self, connection: socket.socket | None, why: str) -> StoreError:
        if connection is not None:
            connection.close()
        return StoreError(f"rank 0, which serves the store of all ranks, does not answer ({why})")

    def _further(self) -> socket.socket:
        """Open one more connection. A server that has too many strangers at the moment disconnects this one, too."""
        end_s = time.monotonic() + CONNECT_S
        while True:
            try:
                return self._connected()
            except ConnectionResetError:
                if time.monotonic() > end_s:
                    raise
            time.sleep(AGAIN_S)

    def _connected(self) -> socket.socket:
        """Open a connection. Raises NotProved: the server does not know the key; OSError: none answers."""
        peer = self._connect()
        try:
            prove(peer, self._key, serves=False, purpose=PURPOSE)
            self._watch(peer)
        except BaseException:
            peer.close()
            raise
        return peer
