"""In: an address of this host, addresses of others. Out: whether they are reached, how fast; a server for the others.
Does not choose who asks whom (network.py does), and judges nothing. Every connection proves the token of the run."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from codescent.doctor.mtu import echo
from codescent.meeting.messages import receive, send
from codescent.transport.accept import Acceptor, Known
from codescent.transport.authenticate import exactly, prove
from codescent.transport.sockets import listen

PURPOSE = b"codescent doctor 2 "
CONNECT_S = 2.0
PINGS, PING = 10, b"12345678"
STREAMS = 4
"""Connections of a volley: one alone does not fill a fast card."""
BLOCK_BYTES = 1 << 18
WARM_SHARE = 0.25
"""First part of a volley that is not counted: TCP finds its rate, and shapers spend what they have saved."""
PEER_S = 30.0
SCHEDULED = Path("/proc/thread-self/schedstat")
AT_ONCE = 16
Address = tuple[str, int]


class PairServer:
    """Answers other hosts, on one address of this one: pings, volleys, datagrams."""

    def __init__(self, address: str, key: bytes, nonce: bytes) -> None:
        self._key = key
        self._tcp = listen(address)
        self._udp = socket.socket(self._tcp.family, socket.SOCK_DGRAM)
        self._udp.bind((address, 0))
        self._acceptor = Acceptor(self._tcp, self._answer, "codescent pairs")
        threading.Thread(target=echo, args=(self._udp, nonce), daemon=True).start()

    @property
    def ports(self) -> dict[str, int]:
        """The ports of TCP and UDP."""
        return {"tcp": self._tcp.getsockname()[1], "udp": self._udp.getsockname()[1]}

    def close(self) -> None:
        """Listen no more."""
        self._acceptor.close()
        with suppress(OSError):  # UDP says that nobody is connected, and lets its thread go all the same
            self._udp.shutdown(socket.SHUT_RDWR)  # a thread that waits would keep the port open
        self._udp.close()

    def _answer(self, peer: socket.socket, address: str, is_known: Known) -> None:
        with peer, suppress(OSError):
            try:
                prove(peer, self._key, serves=True, purpose=PURPOSE)
            finally:
                is_known()
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            seconds = receive(peer, time.monotonic() + PEER_S)[0]["seconds"]
            if seconds:
                send(peer, _drained(peer, seconds), (), time.monotonic() + PEER_S)
                _discard(peer)
                return
            while True:
                peer.sendall(exactly(peer, len(PING), time.monotonic() + PEER_S))


def _drained(peer: socket.socket, seconds: float) -> dict[str, float]:
    """Read for some seconds. Returns the bytes and the seconds after the first part, and the share of `_wanted_s`."""
    wanted_s = _wanted_s()
    buffer, counted, begin_s = bytearray(BLOCK_BYTES * 4), 0, time.monotonic()
    warm_s, end_s = begin_s + WARM_SHARE * seconds, begin_s + seconds
    while (now_s := time.monotonic()) < end_s:
        peer.settimeout(end_s - now_s)
        try:
            if not (count := peer.recv_into(buffer)):
                break
        except TimeoutError:
            break
        counted += count if time.monotonic() > warm_s else 0
    wanted = (_wanted_s() - wanted_s) / (time.monotonic() - begin_s)
    return {"bytes": counted, "seconds": max(1e-3, time.monotonic() - warm_s), "wanted": wanted}


def _wanted_s() -> float:
    """Seconds for which this thread has run, or could have run and found no core free; 0: the system does not say."""
    try:
        running_ns, waiting_ns, _ = SCHEDULED.read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return 0.0
    return (int(running_ns) + int(waiting_ns)) / 1e9


def _discard(peer: socket.socket) -> None:
    """Read on until the sender has closed: closing with unread bytes would destroy the answer on its way."""
    buffer, end_s = bytearray(BLOCK_BYTES), time.monotonic() + 2.0
    while (left_s := end_s - time.monotonic()) > 0:
        peer.settimeout(left_s)
        if not peer.recv_into(buffer):
            return


def _connect(to: Address, key: bytes, seconds: float) -> socket.socket:
    peer = socket.create_connection(to, timeout=CONNECT_S)
    try:
        prove(peer, key, serves=False, purpose=PURPOSE)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        send(peer, {"seconds": seconds}, (), time.monotonic() + CONNECT_S)
    except BaseException:
        peer.close()
        raise
    return peer


def ping(to: Address, key: bytes) -> dict[str, Any]:
    """Reach a host. Returns "latency_s", half of the shortest round trip; or "error"."""
    try:
        with _connect(to, key, 0) as peer:
            return {"latency_s": min(_trip_s(peer) for _ in range(PINGS)) / 2}
    except OSError as error:
        return {"error": error.strerror or str(error)}


def _trip_s(peer: socket.socket) -> float:
    begin_s = time.monotonic()
    peer.sendall(PING)
    exactly(peer, len(PING), begin_s + PEER_S)
    return time.monotonic() - begin_s


def volley(to: Address, key: bytes, seconds: float) -> dict[str, Any]:
    """Send as fast as possible for some seconds. Returns "bytes_per_s" that have arrived; or "error".

    "wanted" is the share of the time in which the threads of a host wanted a core. Where it is high, the link was not
    what limited the rate.
    """
    try:
        with ThreadPoolExecutor(STREAMS) as pool:
            arrived = list(pool.map(lambda _: _sent(to, key, seconds), range(STREAMS)))
    except OSError as error:
        return {"error": error.strerror or str(error)}
    wanted = max(sum(one[side] for one in arrived) for side in ("wanted", "sender_wanted"))
    return {"bytes_per_s": sum(one["bytes"] / one["seconds"] for one in arrived), "wanted": wanted}


def _sent(to: Address, key: bytes, seconds: float) -> dict[str, float]:
    """Send until the other side says what has arrived."""
    block = memoryview(bytes(BLOCK_BYTES))
    with _connect(to, key, seconds) as peer:
        peer.setblocking(False)
        begin_s, wanted_s = time.monotonic(), _wanted_s()
        end_s = begin_s + seconds + PEER_S
        while time.monotonic() < end_s:
            readable, writable, _ = select.select([peer], [peer], [], 1.0)
            if readable:
                found: dict[str, float] = receive(peer, time.monotonic() + PEER_S)[0]
                found["sender_wanted"] = (_wanted_s() - wanted_s) / (time.monotonic() - begin_s)
                # what has not been sent yet is dropped
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                return found
            if writable:
                with suppress(BlockingIOError):
                    peer.send(block)
    raise TimeoutError("the other side does not say what has arrived")


def with_each(peers: Mapping[str, Address], act: Callable[[Address], Any]) -> dict[str, Any]:
    """Call a function with the address of each peer, several at a time."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(zip(peers, pool.map(act, peers.values()), strict=True))
