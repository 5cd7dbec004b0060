"""In: this process among the ranks, the key of the run. Out: on rank 0 a connection to each rank that has come; on the
others a connection to rank 0. Does not ask anything (hub.py does) and needs no torch: torchrun's store is not used."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
import zlib
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from codescent.base.errors import UserError
from codescent.base.loopback import refuse_without_loopback
from codescent.base.rank import LOOPBACK, Rank
from codescent.doctor.messages import receive, send
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
from codescent.transport.accept import Acceptor, Known
from codescent.transport.authenticate import NotProved, prove
from codescent.transport.sockets import has_gone, watch

PURPOSE = b"codescent doctor 1 "
OTHER_PORTS = 4
"""Ports that are tried where MASTER_PORT is taken, or is that of torchrun's store."""
CONNECT_S, AGAIN_S, HELLO_S = 2.0, 0.1, 10.0
WELCOME = "welcome"
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
        connections: by rank.
        facts: of each rank, with that of rank 0.
        rejected: addresses of processes that did not know the token. Who only connects (a probe of ports), or is cut
            off, is none of them.
        surplus: numbers and addresses of processes that know the token and are no ranks of this run, and why not.
        taken: what the port of the run is taken by, in words; "": it is free, or torchrun's.
        address: at which rank 0 listens.
        port: at which it listens.
    """

    address: str
    port: int
    taken: str = ""
    connections: dict[int, socket.socket] = field(default_factory=dict)
    facts: dict[int, dict[str, Any]] = field(default_factory=dict)
    rejected: list[str] = field(default_factory=list)
    surplus: set[tuple[int, str, str]] = field(default_factory=set)
    is_over: bool = False  # nobody is waited for any more


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
    change = threading.Condition()
    with closing(Acceptor(listener, partial(_admit, key, place, found, change), "codescent doctor")):
        with change:
            change.wait_for(lambda: len(found.facts) == place.world_size, wait_s)
            found.is_over = True
        if address == EVERY:  # which one of this machine the others have reached is known by now
            own = (peer.getsockname()[0] for peer in found.connections.values())
            found.address = next((one for one in own if not is_loopback(one)), route_to(place.master_addr))
            found.facts[0]["address"] = found.address
    return found


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
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for port in ports(place):
        try:
            return socket.create_server((address, port), family=family, backlog=max(128, place.world_size)), taken
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


def _admit(
    key: bytes,
    place: Rank,
    found: Gathered,
    change: threading.Condition,
    peer: socket.socket,
    address: str,
    is_known: Known,
) -> None:
    """Let a process in, or not. Each has a thread of its own: a stranger that says nothing holds nobody up."""
    try:
        prove(peer, key, serves=True, purpose=PURPOSE)
        hello = receive(peer, HELLO_S)
        with change:
            why = _enter(peer, address, hello, place.world_size, found)
            change.notify_all()
        if why:
            send(peer, why)
            peer.close()
    except NotProved:
        peer.close()
        with change:
            found.rejected.append(address)
    except (
        OSError,
        LookupError,
        TypeError,
        ValueError,
        ArithmeticError,
        AttributeError,
    ):  # a probe of ports, a rank that was cut off, no rank at all
        peer.close()
    finally:
        is_known()


def _enter(peer: socket.socket, address: str, hello: dict[str, Any], world_size: int, found: Gathered) -> str:
    """Let a process in that knows the token. Returns why not; "": it is in.

    A rank whose first connection has gone, because this machine was too busy to answer, may come again.
    """
    rank, ranks, before = int(hello["rank"]), int(hello["world_size"]), found.connections.get(int(hello["rank"]))
    if found.is_over:
        return TOO_LATE
    why = ""
    if ranks != world_size:
        why = f"is one of {ranks} ranks, but the run has {world_size} ranks"
    elif not 0 < rank < world_size:
        why = f"is none of {world_size} ranks"
    elif before is not None and not has_gone(before):
        why = "is there already"
    if why:
        found.surplus.add((rank, address, why))
        return f"rank {rank} {why}; {ONCE}"
    if before is not None:
        before.close()
    watch(peer)
    send(peer, WELCOME)
    found.connections[rank], found.facts[rank] = peer, hello
    return ""


def join(place: Rank, key: bytes, mine: dict[str, Any], wait_s: float) -> socket.socket:
    """Connect to rank 0, and say what this rank knows of itself.

    Raises UserError: it cannot be reached in time, has another token, or refuses this rank.
    """
    if is_local(place):
        refuse_without_loopback()
    host = LOOPBACK if is_local(place) else place.master_addr
    end_s, problems = time.monotonic() + wait_s, dict[int, OSError]()
    while True:
        for port in ports(place):
            try:
                peer = connected(host, port, CONNECT_S)
            except OSError as error:
                if not isinstance(
                    problems.get(port), NotProved | Refused
                ):  # rank 0 has been there, and has gone meanwhile
                    problems[port] = error
                continue
            try:
                prove(peer, key, serves=False, purpose=PURPOSE)
                send(peer, {**mine, "address": peer.getsockname()[0], "world_size": place.world_size})
                if (answer := receive(peer, HELLO_S)) != WELCOME:
                    raise Refused(str(answer))
            except OSError as error:
                peer.close()
                problems[port] = error
                continue
            watch(peer)
            return peer
        if time.monotonic() > end_s:
            raise _unreached(place, host, problems)
        time.sleep(AGAIN_S)


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
