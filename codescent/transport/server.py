"""In: a listening socket, the key of the run, and a `Service`. Out: the service's answers to processes with the key.
Does not know what requests mean. One thread for each connection: a slow peer holds nobody else up."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from codescent.base.errors import RunFailed
from codescent.base.output import warn
from codescent.transport import frames
from codescent.transport.accept import Acceptor, Known
from codescent.transport.authenticate import HANDSHAKE_S, prove
from codescent.transport.frames import Frame, FrameError, Kind
from codescent.transport.sockets import SILENT_S, has_gone, is_silent, loss_of, watch

REPORTED = 3
"""Largest number of rejected peers that are reported on the standard error."""
LOOK_S = 0.2
"""Seconds between two looks whether the peer of a waiting request is still there."""


class Refused(Exception):
    """The request, or the process, is refused. The text says why and goes to the other side."""


@dataclass(frozen=True)
class Answer:
    """Answer to a request.

    Attributes:
        version: of the weights.
        metadata: an object of JSON.
        payloads: memory that is sent in place. It must not change until `sent` is called.
        sent: called when the payloads are sent, or when the peer has gone.
    """

    version: int = 0
    metadata: dict[str, Any] = field(default_factory=dict)
    payloads: Sequence[memoryview] = ()
    sent: Callable[[], None] | None = None


class Service(Protocol):
    """What a server does with requests. Its methods are called by several threads, and have to lock what they share.

    A request whose connection is lost arrives again, with the same number: whoever applies one remembers it.

    Each method may raise RunFailed, for a request that no process of the run sends: see `Server.failure`.
    """

    def meet(self, sender: int, facts: dict[str, Any]) -> dict[str, Any]:
        """A process connects, or connects again. Returns facts for it. Raises Refused: it has another config."""

    def into(self, request: Frame) -> Sequence[memoryview] | None:
        """Memory for a request's payloads: contiguous, of `request.lengths` bytes. None: they are dropped. May refuse.

        One sender sends one request at a time. The checksum is not known yet: use what is received in `answer` alone.
        """

    def answer(self, request: Frame) -> Answer | None:
        """The answer to a request. Raises Refused.

        None: not now. The service is asked again after another request is answered, a process has left, or
        `Server.changed` was called.
        """

    def left(self, sender: int, why: str, *, silent: bool = False) -> None:
        """A process has disconnected, has died, or its machine is silent. It may connect again."""


class _Peer:
    """A connection of a process that has proved the key."""

    def __init__(self, connection: socket.socket, sender: int) -> None:
        self.connection, self.sender = connection, sender
        self.thread = threading.current_thread()


class Server:
    """Serves the processes of a run on a listening socket, until it is closed.

    Args:
        listener: of `sockets.listen`. The server closes it.
        key: the secret of the run.
        service: answers the requests.
        rank: the sender of the answers.
        senders: ranks that may connect.
        most_bytes: largest sum of payloads of a request.
        silent_s: a process whose machine is silent for this long has left.
    """

    def __init__(
        self,
        listener: socket.socket,
        key: bytes,
        service: Service,
        rank: int,
        senders: Sequence[int],
        most_bytes: int = frames.MOST_BYTES,
        silent_s: float = SILENT_S,
    ) -> None:
        self._key, self._service = key, service
        self._rank, self._senders, self._most_bytes, self._silent_s = rank, senders, most_bytes, silent_s
        self._lock = threading.Lock()
        self._peers: dict[int, _Peer] = {}
        self._open: set[socket.socket] = set()
        self._rejected = 0
        self._changes, self._change = 0, threading.Condition()
        self._closed = False
        self._over, self._told = "", set[int]()  # why nobody is let in any more, and who has heard it
        self.failure: Exception | None = None
        """What the service raised beside Refused. The owner looks here, and ends the process."""
        self.address: tuple[str, int] = listener.getsockname()[:2]
        """At which it listens."""
        self._acceptor = Acceptor(listener, self._connection, "codescent server")

    @property
    def connected(self) -> list[int]:
        """The ranks that are connected now."""
        with self._lock:
            return sorted(self._peers)

    def changed(self) -> None:
        """Ask the service again about requests that it did not answer."""
        with self._change:
            self._changes += 1
            self._change.notify_all()

    def refuse_all(self, why: str, within_s: float) -> None:
        """Disconnect everybody. Who connects again is refused, and told why.

        Returns when all have heard it that were connected, at latest after so many seconds.
        """
        with self._lock:
            self._over = why
            wanted = set(self._peers)
            for peer in self._peers.values():
                _disconnect(peer.connection)
        self.changed()
        end_s = time.monotonic() + within_s
        while time.monotonic() < end_s and not self._told >= wanted:
            time.sleep(LOOK_S / 4)

    def close(self) -> None:
        """Disconnect everybody and end all threads. The service is not told: nobody left by itself."""
        self._closed = True
        self._acceptor.close()
        with self._lock:
            threads = [peer.thread for peer in self._peers.values()]
            for connection in self._open:
                _disconnect(connection)
        self.changed()
        end_s = time.monotonic() + HANDSHAKE_S
        for thread in threads:
            thread.join(max(0.0, end_s - time.monotonic()))

    def _connection(self, connection: socket.socket, address: str, is_known: Known) -> None:
        """The life of a connection: proof, greeting, requests."""
        with self._lock:
            if self._closed:
                connection.close()
                return
            self._open.add(connection)
        peer, why, silent = None, "disconnected", False
        try:
            try:
                prove(connection, self._key, serves=True)
                watch(connection, self._silent_s)
                peer = self._greeted(connection)
            except OSError as error:
                self._report(f"{address} was rejected: {error}")
            finally:
                is_known()
            while peer is not None and self._request(peer):
                pass
        except OSError as error:
            why, silent = str(error), is_silent(error)
        except RunFailed as error:  # the peer has sent what makes no sense: the owner ends the run by one sentence
            self.failure = self.failure or error
            why = str(error)
        except Exception as error:  # a defect of the service, which the process of the server must not survive
            self.failure = self.failure or error
            raise
        finally:
            self._end(connection)
            if peer is not None:
                self._leave(peer, why, silent=silent)

    def _greeted(self, connection: socket.socket) -> _Peer | None:
        """Receive the first frame and answer it. None: the process is refused."""
        end_s = time.monotonic() + HANDSHAKE_S
        hello = frames.receive(connection, end_s, most_bytes=0)
        if hello is None or hello.kind != Kind.HELLO or hello.lengths:
            raise FrameError("the first frame is no greeting")
        if hello.sender not in self._senders:
            raise FrameError(f"rank {hello.sender} is not one of those that may connect")
        peer = _Peer(connection, hello.sender)
        try:
            if self._over:
                self._told.add(hello.sender)
                raise Refused(self._over)
            facts = self._service.meet(hello.sender, hello.metadata)
        except Refused as refusal:
            frames.send(connection, Frame(Kind.REFUSED, self._rank, metadata={"why": str(refusal)}), end_s=end_s)
            return None
        self._replace(peer)
        try:
            frames.send(connection, Frame(Kind.ANSWER, self._rank, metadata=facts), end_s=end_s)
        except OSError as error:
            self._leave(peer, str(error), silent=is_silent(error))
            raise
        return peer

    def _request(self, peer: _Peer) -> bool:
        """Answer one request. Returns whether the connection goes on."""
        request = frames.receive(peer.connection, most_bytes=self._most_bytes)
        if request is None:
            return False
        if request.sender != peer.sender or request.kind not in (Kind.PUSH, Kind.PULL, Kind.EXCHANGE, Kind.ASK):
            raise FrameError(f"rank {peer.sender} sent {request.kind.name} as rank {request.sender}")
        try:
            self._receive_payloads(peer, request)
            answer = self._answered(peer, request)
        except Refused as refusal:
            refused = Frame(Kind.REFUSED, self._rank, request.request, metadata={"why": str(refusal)})
            frames.send(peer.connection, refused)
            return True
        try:
            head = Frame(Kind.ANSWER, self._rank, request.request, answer.version, answer.metadata)
            frames.send(peer.connection, head, answer.payloads)
        finally:
            if answer.sent is not None:
                answer.sent()
        return True

    def _receive_payloads(self, peer: _Peer, request: Frame) -> None:
        """Raises Refused, when all payloads are read: the connection goes on."""
        if not request.lengths:
            return
        try:
            into = self._service.into(request)
        except Refused:
            frames.skip_payloads(peer.connection, request)
            raise
        if into is None:
            frames.skip_payloads(peer.connection, request)
        else:
            frames.receive_payloads(peer.connection, request, into)

    def _answered(self, peer: _Peer, request: Frame) -> Answer:
        """Ask the service until it answers. Raises OSError: meanwhile the peer has gone."""
        while True:
            with self._change:
                seen = self._changes
            if has_gone(peer.connection):
                raise loss_of(peer.connection)
            if (answer := self._service.answer(request)) is not None:
                self.changed()
                return answer
            with self._change:
                self._change.wait_for(lambda seen=seen: self._changes != seen, LOOK_S)  # type: ignore[misc]

    def _replace(self, peer: _Peer) -> None:
        """Make this the connection of its rank. An older one, of which the end was not noticed yet, is ended first."""
        with self._lock:
            older, self._peers[peer.sender] = self._peers.get(peer.sender), peer
        if older is not None:
            _disconnect(older.connection)
            self.changed()
            older.thread.join(HANDSHAKE_S)
            if older.thread.is_alive():  # it answers a request: the new connection would have it answered twice
                with self._lock:
                    self._peers[peer.sender] = older
                raise ConnectionResetError(f"an older request of rank {peer.sender} is still being answered")

    def _leave(self, peer: _Peer, why: str, *, silent: bool) -> None:
        with self._lock:
            if self._peers.get(peer.sender) is not peer:
                return  # a newer connection of this rank is there
            del self._peers[peer.sender]
        if not self._closed:
            self._service.left(peer.sender, why, silent=silent)
            self.changed()

    def _end(self, connection: socket.socket) -> None:
        with self._lock:
            self._open.discard(connection)
            connection.close()

    def _report(self, text: str) -> None:
        self._rejected += 1
        if self._rejected <= REPORTED and not self._closed:
            warn(f"codescent: {text}")


def _disconnect(connection: socket.socket) -> None:
    """End a connection that another thread uses: its calls return with an error. That thread closes it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
