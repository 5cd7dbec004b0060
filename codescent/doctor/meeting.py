"""In: this process among the ranks, the key of the run. Out: on rank 0 the ranks that have come; on the others its
store. Does not ask anything (hub.py does) and needs no torch: torchrun's store is not used."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
import zlib
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

from codescent.base.errors import UserError
from codescent.base.loopback import refuse_without_loopback
from codescent.base.rank import LOOPBACK, Rank
from codescent.launch.environment import PORTS
from codescent.meeting.addresses import (
    ALL,
    EVERY,
    connected,
    is_local,
    is_mine,
    listening_address,
    refuse_other_interface,
    resolved,
    route_to,
)
from codescent.meeting.interfaces import is_loopback
from codescent.meeting.store import StoreError
from codescent.meeting.store_client import StoreClient
from codescent.meeting.store_server import StoreServer
from codescent.transport.authenticate import NotProved
from codescent.transport.sockets import has_gone, listen_at, watch

OTHER_PORTS = 4
"""Ports that are tried where MASTER_PORT is taken, or is that of torchrun's store."""
CONNECT_S, AGAIN_S = 2.0, 0.1
HELLO = timedelta(seconds=5)
TOO_LATE = "it came too late; give rank 0 a longer --wait"
ONCE = (
    "start each rank once, all of them with the same number of ranks (RANK and WORLD_SIZE, as the launcher sets them)"
)


class Refused(ConnectionError):
    """Rank 0 knows the token, and does not take this process as a rank."""


@dataclass
class Gathered:
    """The ranks that have come to rank 0.

    Attributes:
        address: at which rank 0 listens.
        port: at which it listens.
        taken: what the port of the run is taken by, in words; "": it is free, or torchrun's.
        facts: of each rank, with that of rank 0.
        rejected: addresses of processes that did not know the token. Who only connects (a probe of ports), or is cut
            off, is none of them.
        surplus: numbers and addresses of processes that know the token and are no ranks of this run, and why not.
        lost: why a rank has gone, by rank.
        store: of rank 0; None: there is only one rank.
    """

    address: str
    port: int
    taken: str = ""
    facts: dict[int, dict[str, Any]] = field(default_factory=dict)
    rejected: Collection[str] = ()
    surplus: set[tuple[int, str, str]] = field(default_factory=set)
    lost: dict[int, str] = field(default_factory=dict)
    store: StoreClient | None = None
    server: StoreServer | None = None

    def close(self) -> None:
        """Let all ranks go."""
        if self.store is not None:
            self.store.close()
        if self.server is not None:
            self.server.close()


class Roll:
    """Decides for the store of rank 0 which processes are its ranks: see `store_server.Admission`."""

    def __init__(self, world_size: int, found: Gathered) -> None:
        self._world_size, self._found = world_size, found
        self._peers: dict[int, socket.socket] = {}
        self._change = threading.Condition()
        self._is_over = False

    def ask(self, peer: socket.socket, head: Mapping[str, Any]) -> dict[str, Any]:
        """A process says what it knows of itself. The answer has "refused": why it is no rank; "": it is one."""
        with self._change:
            why = self._enter(peer, dict(head["facts"]))
            self._change.notify_all()
        return {"refused": why}

    def left(self, peer: socket.socket, why: str) -> None:
        """A connection has ended."""
        with self._change:
            self._found.lost |= {rank: why for rank, one in self._peers.items() if one is peer}

    def wait(self, seconds: float) -> None:
        """Wait until all ranks have come, or the time is over. Nobody is let in any more."""
        with self._change:
            self._change.wait_for(lambda: len(self._found.facts) == self._world_size, seconds)
            self._is_over = True

    def own_addresses(self) -> list[str]:
        """The addresses of this machine that the ranks have reached."""
        found = []
        with self._change:
            for peer in self._peers.values():
                with suppress(OSError):  # it has gone
                    found.append(str(peer.getsockname()[0]))
        return found

    def _enter(self, peer: socket.socket, facts: dict[str, Any]) -> str:
        """Let a process in. Returns why not; "": it is in.

        A rank whose first connection has gone, because this machine was too busy to answer, may come again.
        """
        rank, ranks = int(facts["rank"]), int(facts["world_size"])
        before, found = self._peers.get(rank), self._found
        if self._is_over:
            return TOO_LATE
        why = ""
        if ranks != self._world_size:
            why = f"is one of {ranks} ranks, but the run has {self._world_size} ranks"
        elif not 0 < rank < self._world_size:
            why = f"is none of {self._world_size} ranks"
        elif before is not None and not has_gone(before):
            why = "is there already"
        if why:
            found.surplus.add((rank, peer.getpeername()[0], why))
            return f"rank {rank} {why}; {ONCE}"
        watch(peer)
        found.lost.pop(rank, None)
        self._peers[rank], found.facts[rank] = peer, facts
        return ""


def ports(place: Rank) -> list[int]:
    """The ports at which rank 0 may be, the same on every rank. With torchrun's store MASTER_PORT is the agent's."""
    name = f"doctor {place.job} {place.master_addr}:{place.master_port}"
    others = [PORTS[zlib.crc32(os.fsencode(f"{name} {number}")) % len(PORTS)] for number in range(OTHER_PORTS)]
    return others if place.agent_store else [place.master_port, *others]


def gather(place: Rank, key: bytes, mine: dict[str, Any], wait_s: float, listen: str | None = None) -> Gathered:
    """Rank 0: wait until all ranks have come, or the time is over.

    Args:
        place: this process among the ranks.
        key: the secret of the run.
        mine: what rank 0 knows of itself.
        wait_s: for the others.
        listen: parallel.listen; None: auto.

    Raises UserError: rank 0 cannot listen.
    """
    if is_local(place):
        refuse_without_loopback()
    listener, taken = _listen(place, listen)
    address, port = listener.getsockname()[:2]
    found = Gathered(address, port, taken, facts={0: mine | {"address": address}})
    roll = Roll(place.world_size, found)
    found.server = StoreServer(listener, key, roll, says=False)  # it is a finding, where ranks are missing
    found.rejected = found.server.rejected
    end_s = time.monotonic() + wait_s
    try:
        found.store = _own_store(LOOPBACK if address == EVERY else address, port, key, end_s)
    except BaseException:
        found.close()
        raise
    roll.wait(max(0.0, end_s - time.monotonic()))
    if address == EVERY:  # which one of this machine the others have reached is known by now
        reached = (one for one in roll.own_addresses() if not is_loopback(one))
        found.address = next(reached, None) or route_to(place.master_addr)
        found.facts[0]["address"] = found.address
    return found


def _own_store(address: str, port: int, key: bytes, end_s: float) -> StoreClient:
    """Rank 0's client of its own store. Raises UserError: it is not let in before `end_s`: strangers shut it out."""
    while True:
        try:
            return StoreClient(partial(socket.create_connection, (address, port), CONNECT_S), key, HELLO)
        except OSError as error:
            if time.monotonic() > end_s:
                raise UserError(
                    f"rank 0 on {socket.gethostname()} cannot connect to its own port {port} of {address} ({error}); "
                    "set MASTER_PORT to another one, for every rank"
                ) from error
        time.sleep(AGAIN_S)


def _listen(place: Rank, listen: str | None) -> tuple[socket.socket, str]:
    """A listening socket, and what MASTER_PORT is taken by."""
    given = None if place.store_fd is None else socket.socket(fileno=place.store_fd)
    if given is not None and listen is None:
        return given, ""
    address, taken = _address(place, listen), ""
    if given is not None:
        if is_local(place):
            return given, ""
        given.close()
    for port in ports(place):
        try:
            return listen_at(address, port, place.world_size), taken
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise UserError(
                    f"rank 0 on {socket.gethostname()} cannot listen at {address}:{port}: {error.strerror}; set "
                    "MASTER_ADDR to an address of this machine, for every rank"
                ) from error
            taken = taken or f"port {port} of {address}"
    raise UserError(
        f"rank 0 on {socket.gethostname()}: every port that it tried is taken; set MASTER_PORT to a free one"
    )


def _address(place: Rank, listen: str | None) -> str:
    """The address at which a run listens, with two exceptions: the other ranks do not read the config.

    Where all ranks are on this machine, it is loopback always. With torchrun's store a run says there where it listens.
    The ranks of the doctor do not read that store: they connect to MASTER_ADDR.

    Raises UserError: as a run.
    """
    address = listening_address(place, listen)
    if is_local(place):
        return LOOPBACK
    if listen is None or listen == ALL:
        return address
    if place.agent_store:
        with suppress(UserError):  # MASTER_ADDR means loopback here: nobody knows where it leads elsewhere
            return listening_address(place)
        return address
    with suppress(OSError):
        found = resolved(place.master_addr)
        if any(map(is_mine, found)):
            refuse_other_interface(place, listen, address, found)
    return address


def join(place: Rank, key: bytes, mine: dict[str, Any], wait_s: float) -> StoreClient:
    """Connect to rank 0, and say what this rank knows of itself. Returns the store of rank 0.

    Raises UserError: it cannot be reached in time, has another token, or refuses this rank.
    """
    if is_local(place):
        refuse_without_loopback()
    host = LOOPBACK if is_local(place) else place.master_addr
    end_s, problems = time.monotonic() + wait_s, dict[int, OSError]()
    while True:
        for port in ports(place):
            try:
                return _entered(place, (host, port), key, mine)
            except OSError as error:
                if isinstance(error, NotProved | Refused) or not isinstance(problems.get(port), NotProved | Refused):
                    problems[port] = error  # another one is none: rank 0 has been there, and has gone meanwhile
        if time.monotonic() > end_s:
            raise _unreached(place, host, problems)
        time.sleep(AGAIN_S)


def _entered(place: Rank, to: tuple[str, int], key: bytes, mine: dict[str, Any]) -> StoreClient:
    """The store at an address, which has taken this process as a rank. Raises OSError: there is none, or it has not."""
    store = StoreClient(lambda: connected(*to, CONNECT_S), key, HELLO, watch)
    try:
        about = {"facts": {**mine, "address": store.address(), "world_size": place.world_size}}
        if why := store.meet(about)["refused"]:
            raise Refused(why)
        store.stay()
    except StoreError as error:
        store.close()
        raise ConnectionError(str(error)) from error
    except BaseException:
        store.close()
        raise
    return store


def _unreached(place: Rank, host: str, problems: dict[int, OSError]) -> UserError:
    """Why this rank could not join."""
    port = ports(place)[0]
    who = place.here()
    stranger = next((one for one, error in problems.items() if isinstance(error, NotProved)), None)
    if stranger is not None:
        return UserError(
            f"{who}: the process at {host}:{stranger} has another token; export CODESCENT_TOKEN, the same text on "
            "every host, or copy ~/.codescent/token to all of them"
        )
    refused = next((one for one, error in problems.items() if isinstance(error, Refused)), None)
    if refused is not None:
        return UserError(f"{who}: rank 0 at {host}:{refused} refuses it: {problems[refused]}")
    shown = f"{host}, which is {_resolved(host)} here" if _resolved(host) != host else host
    return UserError(
        f"{who}: cannot reach rank 0 at {shown}, port {port} ({problems[port].strerror or problems[port]}); let TCP "
        f"through between the hosts, or set MASTER_ADDR to an address of rank 0 that this host reaches"
    )


def _resolved(host: str) -> str:
    try:
        return resolved(host)[0]
    except OSError as error:
        return f"unknown ({error.strerror or error})"
