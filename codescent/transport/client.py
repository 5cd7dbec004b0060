"""In: the address of a server, the key of the run, requests. Out: answers; a lost connection is made again.
Does not decide what is sent. One request is under way at a time."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

from codescent.base.errors import RunFailed
from codescent.transport import frames
from codescent.transport.authenticate import HANDSHAKE_S, NotProved, prove
from codescent.transport.frames import Frame, FrameError, Kind, SizesDiffer
from codescent.transport.server import Refused
from codescent.transport.sockets import SILENT_S, has_gone, watch

PAUSE_S = 0.05, 1.0
"""Seconds between two attempts to connect: at first, and at most. They double."""
KEEP_S = 1.0
"""Seconds between two looks at a connection that is kept."""


class ServerLost(RunFailed):
    """A server does not answer within the timeout, does not know the run's token, or does not let this process in."""


class Client:
    """A process of the run at one server. It connects with the first request.

    Args:
        address: host and port of the server.
        key: the secret of the run.
        rank: of this process.
        name: of the server, in messages, such as "server 0 (rank 3)".
        facts: JSON that the server compares with its own, when they meet.
        timeout_s: how long a request may take, with all attempts. A server may let it wait for other workers.
        silent_s: a connection ends when the server's machine is silent for this long.
    """

    def __init__(
        self,
        address: tuple[str, int],
        key: bytes,
        rank: int,
        name: str,
        facts: dict[str, Any] | None = None,
        timeout_s: float = 60.0,
        silent_s: float = SILENT_S,
    ) -> None:
        self._address, self._key, self._rank, self._name = address, key, rank, name
        self._facts, self._timeout_s, self._silent_s = facts or {}, timeout_s, silent_s
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._peer: socket.socket | None = None
        self._request, self._has_met = 0, False
        self.met: dict[str, Any] = {}
        """What the server said when they met last: empty before the first request."""

    def request(
        self,
        kind: Kind,
        version: int = 0,
        metadata: dict[str, Any] | None = None,
        payloads: Sequence[memoryview] = (),
        into: Sequence[memoryview] = (),
        number: int | None = None,
    ) -> Frame:
        """Send a request and receive the answer. If the connection is lost, the same request is sent again.

        Args:
            kind: PUSH, PULL, EXCHANGE or ASK.
            version: of the weights.
            metadata: JSON.
            payloads: contiguous memory, sent in place. It must not change meanwhile.
            into: contiguous, writable memory for the answer's payloads. It is undefined after an exception. An answer
                without payloads leaves it as it is.
            number: of the request; None: one more than before. The server knows a repeated push by it.

        Raises:
            Refused: the server refuses the request.
            ServerLost: no answer came within the timeout, it has payloads of other sizes, or the server is not one of
            this run, or does not let this process in.
        """
        with self._lock:
            self._request = self._request + 1 if number is None else number
            frame = Frame(kind, self._rank, self._request, version, metadata or {})
            end_s, pause_s = time.monotonic() + self._timeout_s, PAUSE_S[0]
            while True:
                if self._closed.is_set():
                    raise ServerLost(f"{self._where()}: rank {self._rank} has closed its connection")
                try:
                    return self._attempt(frame, payloads, into, end_s)
                except NotProved as error:
                    self._disconnect()
                    raise ServerLost(f"{self._where()} does not know the token of this run") from error
                except Refused:
                    raise
                except SizesDiffer as error:
                    self._disconnect()
                    raise ServerLost(f"{self._where()} answers rank {self._rank} with {error}") from error
                except OSError as error:
                    self._disconnect()
                    if time.monotonic() + pause_s >= end_s:
                        text = f"{self._where()} has not answered rank {self._rank} for {self._timeout_s:g} s ({error})"
                        raise ServerLost(text) from error
                except BaseException:  # a wrong call, or an interrupt: half a frame may have been sent
                    self._disconnect()
                    raise
                self._closed.wait(pause_s)
                pause_s = min(2 * pause_s, PAUSE_S[1])

    def keep(self) -> None:
        """Between two requests a lost connection is made again, too. So the server knows that this process lives."""
        threading.Thread(target=self._keep, name="codescent keeps", daemon=True).start()

    def _keep(self) -> None:
        while not self._closed.wait(KEEP_S):
            if self._has_met and self._lock.acquire(blocking=False):  # else a request is under way, and connects itself
                try:
                    if self._peer is None or has_gone(self._peer):
                        self._disconnect()
                        self._connect(time.monotonic() + HANDSHAKE_S)
                except (OSError, NotProved, ServerLost):  # the next request raises it, if it lasts
                    self._disconnect()
                finally:
                    self._lock.release()

    def close(self) -> None:
        """Disconnect. The server is told that this process has left.

        A request under way in another thread ends with ServerLost: at once, or after its attempt to connect.
        """
        self._closed.set()
        if (peer := self._peer) is not None:
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for an answer
        with self._lock:
            self._disconnect()

    def _attempt(self, frame: Frame, payloads: Sequence[memoryview], into: Sequence[memoryview], end_s: float) -> Frame:
        peer = self._peer if self._peer is not None else self._connect(end_s)
        frames.send(peer, frame, payloads, end_s)
        answer = _received(peer, frame.request, end_s)
        if answer.lengths:
            frames.receive_payloads(peer, answer, into, end_s)
        return answer

    def _connect(self, end_s: float) -> socket.socket:
        left_s = min(HANDSHAKE_S, max(0.001, end_s - time.monotonic()))
        peer = socket.create_connection(self._address, timeout=left_s)
        try:
            prove(peer, self._key, serves=False)
            watch(peer, self._silent_s)
            end_s = min(end_s, time.monotonic() + 2 * HANDSHAKE_S)  # the server ends an older connection first
            frames.send(peer, Frame(Kind.HELLO, self._rank, metadata=self._facts), end_s=end_s)
            try:
                self.met = _received(peer, 0, end_s).metadata
            except Refused as refusal:
                raise ServerLost(f"{self._where()} does not let rank {self._rank} in: {refusal}") from refusal
            self._peer, self._has_met = peer, True
            if self._closed.is_set():  # `close` may have looked for a connection just before
                raise ConnectionAbortedError("closed")
        except BaseException:
            peer.close()
            self._peer = None
            raise
        return peer

    def _disconnect(self) -> None:
        if self._peer is not None:
            with contextlib.suppress(OSError):
                self._peer.close()
            self._peer = None

    def _where(self) -> str:
        return f"{self._name} at {self._address[0]}:{self._address[1]}"


def _received(peer: socket.socket, request: int, end_s: float) -> Frame:
    """The head of the answer to a request. Raises Refused."""
    answer = frames.receive(peer, end_s)
    if answer is None:
        raise ConnectionResetError("it has disconnected")
    if answer.kind not in (Kind.ANSWER, Kind.REFUSED) or answer.request != request:
        raise FrameError(f"{answer.kind.name} {answer.request} instead of an answer to {request}")
    if answer.kind is Kind.REFUSED:
        raise Refused(str(answer.metadata.get("why")))
    return answer
