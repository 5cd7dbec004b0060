"""In: this process among the ranks, the key of the run. Out: on rank 0 the ranks that have come; on the others its
store. Does not ask anything (hub.py does) and needs no torch: torchrun's store is not used."""

from __future__ import annotations

import errno
import os
import socket
import time
import zlib
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

from codescent.base.errors import UserError
from codescent.base.rank import LOOPBACK, Rank
from codescent.doctor.roll import Gathered, Roll
from codescent.launch.environment import PORTS
from codescent.meeting.addresses import (
    ALL,
    EVERY,
    addresses_of,
    is_local,
    leads_here,
    listening_address,
    resolved,
    route_to,
)
from codescent.meeting.interfaces import is_loopback
from codescent.meeting.rendezvous import Meeting, refuse_unreachable
from codescent.meeting.sockets import again, connected, listening
from codescent.meeting.store import StoreError
from codescent.meeting.store_client import StoreClient
from codescent.meeting.store_server import StoreServer
from codescent.transport.authenticate import NotProved
from codescent.transport.sockets import watch

OTHER_PORTS = 4
"""Ports that are tried where MASTER_PORT is taken, or is that of torchrun's store."""
CONNECT_S = 2.0
HELLO = timedelta(seconds=5)


class Refused(ConnectionError):
    """Rank 0 knows the token, and does not take this process as a rank."""


def ports(this_rank: Rank) -> list[int]:
    """The ports at which rank 0 may be, the same on every rank. With torchrun's store MASTER_PORT is the agent's."""
    name = f"doctor {this_rank.job} {this_rank.master_addr}:{this_rank.master_port}"
    others = [PORTS[zlib.crc32(os.fsencode(f"{name} {number}")) % len(PORTS)] for number in range(OTHER_PORTS)]
    return others if this_rank.agent_store else [this_rank.master_port, *others]


def gather(this_rank: Rank, key: bytes, mine: dict[str, Any], wait_s: float, listen: str | None = None) -> Gathered:
    """Rank 0: wait until all ranks have come, or the time is over.

    Args:
        this_rank: this process among the ranks.
        key: the secret of the run.
        mine: what rank 0 knows of itself.
        wait_s: for the others.
        listen: parallel.listen; None: auto.

    Raises UserError: rank 0 cannot listen.
    """
    refuse_unreachable(this_rank)
    listener = _listener(this_rank, _followed(this_rank, listen))
    address, port = listener.getsockname()[:2]
    is_of_run = this_rank.agent_store or port == this_rank.master_port
    taken = "" if is_of_run else f"port {this_rank.master_port} of {address}"
    found = Gathered(address, port, taken, facts={0: mine | {"address": address}})
    roll = Roll(this_rank.world_size, found)
    server = StoreServer(listener, key, roll, says=False)  # it is a finding, where ranks are missing
    found.rejected = server.rejected
    end_s = time.monotonic() + wait_s
    try:
        found.meeting = Meeting(_own_store(LOOPBACK if address == EVERY else address, port, key, end_s), server)
    except BaseException:
        server.close()
        raise
    roll.wait(max(0.0, end_s - time.monotonic()))
    if address == EVERY:  # which one of this machine the others have reached is known by now
        reached = (one for one in roll.own_addresses() if not is_loopback(one))
        found.address = next(reached, None) or route_to(this_rank.master_addr)
        found.facts[0]["address"] = found.address
    return found


def _own_store(address: str, port: int, key: bytes, end_s: float) -> StoreClient:
    """Rank 0's client of its own store. Raises UserError: it is not let in before `end_s`: strangers shut it out."""

    def gives_up(error: OSError) -> UserError | None:
        if time.monotonic() <= end_s:
            return None
        return UserError(
            f"rank 0 on {socket.gethostname()} cannot connect to its own port {port} of {address} ({error}); "
            "set MASTER_PORT to another one, for every rank"
        )

    return again(partial(StoreClient, partial(connected, [address], port, CONNECT_S), key, HELLO), gives_up)


def _listener(this_rank: Rank, listen: str | None) -> socket.socket:
    """A listening socket at MASTER_PORT, or where this is taken at another port."""
    tried = ports(this_rank)
    try:
        return listening(this_rank, listen, tried)
    except OSError as error:
        who = f"rank 0 on {socket.gethostname()}"
        if error.errno == errno.EADDRINUSE:
            raise UserError(f"{who}: every port that it tried is taken; set MASTER_PORT to a free one") from error
        raise UserError(
            f"{who} cannot listen at {listening_address(this_rank, listen)}:{tried[0]}: {error.strerror}; set "
            "MASTER_ADDR to an address of this machine, for every rank"
        ) from error


def _followed(this_rank: Rank, listen: str | None) -> str | None:
    """parallel.listen, where the other ranks follow it. They do not read the config: they connect to MASTER_ADDR.

    Where all ranks are on this machine, they connect to loopback. With torchrun's store a run says there where it
    listens; the ranks of the doctor do not read that store.

    Raises UserError: as a run.
    """
    if listen is None:
        return None
    address = listening_address(this_rank, listen)
    if is_local(this_rank):
        return None
    if listen == ALL:
        return listen
    if this_rank.agent_store:
        with suppress(UserError):  # MASTER_ADDR means loopback here: nobody knows where it leads elsewhere
            listening_address(this_rank)
            return None
        return listen
    with suppress(OSError):
        leads_here(this_rank, listen, address)
    return listen


def join(this_rank: Rank, key: bytes, mine: dict[str, Any], wait_s: float) -> StoreClient:
    """Connect to rank 0, and say what this rank knows of itself. Returns the store of rank 0.

    Raises UserError: it cannot be reached in time, has another token, or refuses this rank.
    """
    refuse_unreachable(this_rank)
    host = LOOPBACK if is_local(this_rank) else this_rank.master_addr
    end_s, problems = time.monotonic() + wait_s, dict[int, OSError]()

    def enter() -> StoreClient:
        for port in ports(this_rank):
            try:
                return _entered(this_rank, (host, port), key, mine)
            except OSError as error:
                if isinstance(error, NotProved | Refused) or not isinstance(problems.get(port), NotProved | Refused):
                    problems[port] = error  # another one is none: rank 0 has been there, and has gone meanwhile
        raise ConnectionError("no port answers")

    return again(enter, lambda _: _unreached(this_rank, host, problems) if time.monotonic() > end_s else None)


def _entered(this_rank: Rank, to: tuple[str, int], key: bytes, mine: dict[str, Any]) -> StoreClient:
    """The store at an address, which has taken this process as a rank. Raises OSError: there is none, or it has not."""
    host, port = to
    store = StoreClient(lambda: connected(addresses_of(host), port, CONNECT_S), key, HELLO, watch)
    try:
        about = {"facts": {**mine, "address": store.address(), "world_size": this_rank.world_size}}
        if why := store.meet(about)["refused"]:
            raise Refused(why)
    except StoreError as error:
        store.close()
        raise ConnectionError(str(error)) from error
    except BaseException:
        store.close()
        raise
    return store


def _unreached(this_rank: Rank, host: str, problems: dict[int, OSError]) -> UserError:
    """Why this rank could not join."""
    port = ports(this_rank)[0]
    who = this_rank.here()
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
