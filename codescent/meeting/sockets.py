"""In: where rank 0 may be. Out: its listening socket; connections to it, tried again and again.
Does not choose addresses (addresses.py does), and proves nothing (store_client.py and store_server.py do)."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from codescent.base.rank import Rank
from codescent.meeting.addresses import listening_address, named
from codescent.transport.sockets import listen_at

T = TypeVar("T")

AGAIN_S = 0.1
"""Seconds between two attempts to reach rank 0."""


def listening(this_rank: Rank, listen: str | None, ports: Sequence[int]) -> socket.socket:
    """The socket on which rank 0 serves the store: that of its launcher, or a new one at the first port that is free.

    Args:
        this_rank: rank 0.
        listen: parallel.listen; None: auto. The launcher's socket listens by this rule.
        ports: which are tried, in this order. With the launcher's socket they are not used.

    Raises:
        UserError: as `listening_address`.
        OSError: it cannot listen there; EADDRINUSE: all ports are taken.
    """
    if this_rank.store_fd is not None:
        given = socket.socket(fileno=this_rank.store_fd)
        if listen is None:
            return given
        given.close()
    address = listening_address(this_rank, listen)
    for port in ports[:-1]:
        try:
            return listen_at(address, port, this_rank.world_size)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    return listen_at(address, ports[-1], this_rank.world_size)


def connected(hosts: Sequence[str], port: int, within_s: float) -> socket.socket:
    """A connection to the first of several names or addresses that answers, each within so many seconds.

    Raises OSError: none does. A name may be unknown, or none that a host can have.
    """
    error: OSError = ConnectionError("no address")
    for host in hosts:
        try:
            with named(host):
                return socket.create_connection((host, port), timeout=within_s)
        except OSError as failed:
            error = failed
    raise error


def again(act: Callable[[], T], gives_up: Callable[[OSError], Exception | None], pause_s: float = AGAIN_S) -> T:
    """What `act` returns. It is called again and again while it raises OSError.

    Args:
        act: for example, connects to rank 0.
        gives_up: is told each error. It returns what is raised in its place; None: `act` is called once more.
        pause_s: seconds between two calls.
    """
    while True:
        try:
            return act()
        except OSError as error:
            if (final := gives_up(error)) is not None:
                raise final from error
        time.sleep(pause_s)
