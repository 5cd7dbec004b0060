"""In: an address of this machine. Out: sockets that listen there alone, and that notice a silent other machine.
Does not choose the address (meeting/addresses.py knows the interface of the route) and sends nothing."""

from __future__ import annotations

import errno
import ipaddress
import os
import select
import socket
import time

SILENT_S = 4.0
"""After this many seconds without any answer of the other machine's kernel a connection ends: noticed within 5 s."""
BACKLOG = 512
UNREACHABLE = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETUNREACH, errno.ENETDOWN}
"""Errors of a connection whose other machine does not answer: it is off, or a link on the way is cut."""


def listen(address: str, port: int = 0) -> socket.socket:
    """A socket that listens on one address of this machine.

    Args:
        address: an IP address. A host name is refused, and so is the address of all interfaces.
        port: 0: any free one.

    Raises:
        ValueError: `address` is no address of one interface.
        OSError: it is not of this machine, or the port is taken.
    """
    parsed = ipaddress.ip_address(address)
    if parsed.is_unspecified:
        raise ValueError(f"{address} is every interface: name the one that connects the ranks")
    return listen_at(address, port)


def listen_at(address: str, port: int, peers: int = BACKLOG) -> socket.socket:
    """A socket that listens at an IP address, which may be that of all interfaces.

    `peers` may connect at the same time. Raises OSError: the address is not of this machine, or the port is taken.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=max(128, peers))


def limit(peer: socket.socket, end_s: float) -> None:
    """Have the next call on a socket raise TimeoutError after `end_s`, a time.monotonic(), or a little later.

    To set a limit is a system call. So one that was set before, and is at most a quarter too long, stays.
    """
    left_s = end_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("timed out")
    before_s = peer.gettimeout()
    if before_s is None or not left_s <= before_s <= 1.25 * left_s:
        peer.settimeout(left_s)


def watch(peer: socket.socket, silent_s: float = SILENT_S) -> None:
    """Have the kernel end a connection whose other machine is silent. Requests leave at once (TCP_NODELAY).

    Keep-alive tests an idle connection each second. TCP_USER_TIMEOUT bounds how long sent bytes, or those tests, stay
    unacknowledged. A stopped process on a live machine is not silent: its kernel answers. But a sender that waits so
    long for a stopped receiver's window is disconnected; it may connect and send again.
    """
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", 1),
        ("TCP_KEEPINTVL", 1),
        ("TCP_KEEPCNT", max(1, round(silent_s) - 1)),
        ("TCP_USER_TIMEOUT", round(silent_s * 1000)),  # milliseconds; Linux alone has it
    ):
        if hasattr(socket, name):
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def has_gone(peer: socket.socket) -> bool:
    """Whether the other side has disconnected, or the kernel has given it up. Reads nothing, and does not wait."""
    if peer.fileno() < 0:
        return True
    poll = select.poll()
    poll.register(peer, getattr(select, "POLLRDHUP", 0))
    return bool(poll.poll(0))  # POLLHUP, POLLERR and POLLNVAL are always reported


def loss_of(peer: socket.socket) -> OSError:
    """Why a connection has gone. The kernel says it once: to the first who asks, or reads."""
    number = peer.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) if peer.fileno() >= 0 else 0
    return OSError(number, os.strerror(number)) if number else ConnectionResetError("the other side has disconnected")


def is_silent(loss: OSError) -> bool:
    """Whether the other machine was silent. Otherwise its kernel has closed the connection, or this side has."""
    return loss.errno in UNREACHABLE
