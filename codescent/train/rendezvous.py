"""In: a rank's place. Out: the store at which all ranks meet, and what they learn there of each other.
Does not make process groups (world does) and chooses no device (devices does)."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import AuthenticationError
from typing import Any

from torch.distributed import (  # type: ignore[attr-defined]
    DistError,
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
)

from codescent.base import token
from codescent.base.errors import UserError
from codescent.base.rank import LOOPBACK, Rank
from codescent.train.addresses import is_local, listening_address
from codescent.train.devices import refusal
from codescent.train.store import StoreServer, TokenStore

_Where = Callable[[], tuple[str, int]]

AGAIN_S = 0.1
"""Time between two attempts to reach rank 0."""
STRANGER_S = 3.0
"""How long another job may still be leaving the port at which rank 0 is looked for."""


@dataclass(frozen=True)
class Meeting:
    """Where the ranks meet.

    Attributes:
        store: of small values.
        server: that serves it; None but on rank 0 of several.
        address: of this machine, from which rank 0 is reached.
    """

    store: Store
    server: StoreServer | None = None
    address: str = LOOPBACK

    def close(self) -> None:
        """Leave. Rank 0's port is closed: a program that comes after this one may meet there."""
        if isinstance(self.store, TokenStore):
            self.store.close()
        if self.server is not None:
            self.server.close()


@dataclass(frozen=True)
class Neighbours:
    """The first rank of each machine, and how many ranks may use this one's cores (some launchers bind each rank)."""

    leaders: list[int]
    sharing: int


def meet(place: Rank, timeout: timedelta) -> Meeting:
    """The store of all ranks, which rank 0 serves. Who does not show the run's token is not let in.

    Raises:
        UserError: this rank does not reach rank 0 in time, or not with its token; the port is taken.
    """
    if place.world_size == 1:
        return Meeting(HashStore())
    # Each start of each job has its own key: ranks of another one, at the same port, are strangers. Agents of torchrun
    # count attempts each by itself.
    attempt = 0 if place.agent_store else place.attempt
    key = token.key_of(os.environ, f"{place.job} attempt {attempt} of {place.world_size}")
    listener = _listening(place) if place.rank == 0 else None
    where = _address_at_agent(place, timeout, listener) if place.agent_store else lambda: _address(place)
    server = None if listener is None else StoreServer(listener, key)
    try:
        store = _join(place, where, key, timeout)
    except BaseException:
        if server is not None:
            server.close()
        raise
    return Meeting(store, server, store.address())


def _listening(place: Rank) -> socket.socket:
    """A socket for rank 0 to serve the store on: on loopback, or on the interface by which the others come."""
    if place.store_fd is not None:
        return socket.socket(fileno=place.store_fd)
    address = listening_address(place)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    port = 0 if place.agent_store else place.master_port
    try:
        return socket.create_server((address, port), family=family, backlog=max(128, place.world_size))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UserError(
                f"{_who(place)}: cannot listen at port {port}, which is taken; set MASTER_PORT to a free one, for "
                f"every rank ({error})"
            ) from error
        raise UserError(f"{_who(place)}: cannot listen at {address}:{port} ({error}); set MASTER_ADDR") from error


def _address(place: Rank) -> tuple[str, int]:
    """Where rank 0 is, as the launcher says."""
    return (LOOPBACK if is_local(place) else place.master_addr), place.master_port


def _address_at_agent(place: Rank, timeout: timedelta, listener: socket.socket | None) -> _Where:
    """Where rank 0 is, as it says at the store of torchrun's agent, which is asked anew at each call.

    That store asks for no token. It is believed where to show ours, to who listens at that very address: who writes
    another one can keep the ranks apart, and no more.
    """
    try:
        agent = TCPStore(place.master_addr, place.master_port, place.world_size, False, timeout)
        store = PrefixStore(f"codescent {place.job}", agent)
        if listener is not None:
            store.set("rank 0", json.dumps(listener.getsockname()[:2]))
    except DistError as error:
        raise _silent_agent(place, timeout, error) from error

    def where() -> tuple[str, int]:
        try:
            host, port = json.loads(store.get("rank 0"))
        except DistError as error:
            raise _silent_agent(place, timeout, error) from error
        return str(host), int(port)

    return where


def _silent_agent(place: Rank, timeout: timedelta, error: Exception) -> UserError:
    return UserError(
        f"{_who(place)}: torchrun's store at {place.master_addr}:{place.master_port} does not say where rank 0 is "
        f"within {timeout.total_seconds():g} s ({error}); either rank 0 has ended, and says why, or torchrun has"
    )


def _join(place: Rank, where: _Where, key: bytes, timeout: timedelta) -> TokenStore:
    """Connect to rank 0, which may come later. Raises UserError: it does not come in time, or does not know the key."""
    begin = time.monotonic()
    seconds = timeout.total_seconds()

    def connect() -> socket.socket:
        return socket.create_connection(where(), timeout=max(1.0, min(seconds, 10.0)))

    while True:
        spent_s = time.monotonic() - begin
        try:
            return TokenStore(connect, key, timeout)
        except AuthenticationError as error:
            if spent_s > min(STRANGER_S, seconds):
                raise UserError(
                    f"{_who(place)}: who listens at {_shown(where())} has another token than this rank; either another "
                    f"job is at this port: set MASTER_PORT to a free one, for every rank; or the ranks' machines have "
                    f"no common {token.FILE}: copy it, or export {token.TOKEN}, any text that is hard to guess, for "
                    "every rank"
                ) from error
        except OSError as error:
            if spent_s > seconds:
                raise _unreached(place, _shown(where()), seconds, error) from error
        time.sleep(AGAIN_S)


def compare(store: Store, place: Rank, wanted: str, device: str, facts: Mapping[str, Any]) -> Neighbours:
    """Rank 0 compares what all ranks say of themselves. Collective, through a fresh store.

    Args:
        store, place: of this rank.
        wanted: train.device.
        device: this rank's, by `devices.name_of`.
        facts: JSON by name, which must be equal on all ranks.

    Raises:
        UserError: on every rank: two have the same device, some have none, a fact differs, or a rank does not come.
    """
    mine = {"device": device, "local_rank": place.local_rank, "host": socket.gethostname(), "cores": _cores()}
    try:
        store.set(f"rank{place.rank}", json.dumps({**mine, "facts": dict(facts)}))
        if place.rank == 0:
            found = store.multi_get([f"rank{rank}" for rank in range(place.world_size)])
            store.set("ranks", json.dumps(_compared([json.loads(one) for one in found], wanted)))
        compared = json.loads(store.get("ranks"))
        stay_until_read(store, place, "ranks")
    except DistError as error:
        raise UserError(
            f"{_who(place)}: {_absent(store, place)} ({error}); either one has ended, and says why, or cannot reach "
            "rank 0: set MASTER_ADDR, for every rank; or another job is at this port: set MASTER_PORT to a free one"
        ) from error
    if compared["problems"]:
        raise UserError(*compared["problems"])
    return Neighbours(compared["leaders"], compared["sharing"][place.rank])


def stay_until_read(store: Store, place: Rank, what: str) -> None:
    """Rank 0, which serves the store, and may end next, waits until all have read something. Collective."""
    if place.rank:
        store.set(f"{what} read by {place.rank}", "")
        return
    with contextlib.suppress(DistError):  # who has ended does not read it
        store.multi_get([f"{what} read by {rank}" for rank in range(1, place.world_size)])


def _absent(store: Store, place: Rank) -> str:
    """Which ranks have not come, as far as the store can still be asked."""
    with contextlib.suppress(DistError):
        if isinstance(store, TokenStore):
            there = store.there([f"rank{rank}" for rank in range(place.world_size)])
            absent = [str(rank) for rank, came in enumerate(there) if not came]
            if absent:
                return f"not every rank has come: missing {', '.join(absent)} of {place.world_size}"
    return "not every rank has come"


def _compared(ranks: list[dict[str, Any]], wanted: str) -> dict[str, object]:
    cores = [rank["cores"] for rank in ranks]
    devices = refusal([str(rank["device"]) for rank in ranks], wanted)
    return {
        "problems": [*([devices] if devices else []), *differences(ranks)],
        "leaders": [number for number, rank in enumerate(ranks) if rank["local_rank"] == 0],
        "sharing": [cores.count(mine) for mine in cores],
    }


def differences(ranks: list[dict[str, Any]]) -> list[str]:
    """A sentence for each fact that is not the same on all ranks. Each of `ranks` has a "host" and its "facts"."""
    problems = []
    for name in dict.fromkeys(name for rank in ranks for name in rank["facts"]):
        who: dict[str, list[str]] = {}
        for number, rank in enumerate(ranks):
            value = json.dumps(rank["facts"][name]) if name in rank["facts"] else "absent"
            who.setdefault(value, []).append(f"{number} ({rank['host']})")
        if len(who) > 1:
            said = "; ".join(f"{value} on {_ranks(numbers)}" for value, numbers in who.items())
            problems.append(f"the ranks do not do the same run: {name} is {said}: start every rank with the same")
    return problems


def _ranks(numbers: list[str]) -> str:
    shown = ", ".join(numbers[:4]) + (f" and {len(numbers) - 4} more" if len(numbers) > 4 else "")
    return f"rank{'s' if len(numbers) > 1 else ''} {shown}"


def _cores() -> str:
    """The cores of this machine that this process may use."""
    mask = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []
    return f"{socket.gethostname()} {','.join(map(str, mask))}"


def _shown(where: tuple[str, int]) -> str:
    return f"{where[0]}:{where[1]}"


def _who(place: Rank) -> str:
    by = f", numbered by {place.launcher}," if place.launcher else ""
    return f"rank {place.rank} of {place.world_size}{by} on {socket.gethostname()}"


def _unreached(place: Rank, where: str, seconds: float, error: Exception) -> UserError:
    if place.rank == 0:
        return UserError(
            f"{_who(place)}: listens at port {place.master_port}, but is not reached at {where}, where the others look "
            f"for it: that is not this machine; set MASTER_ADDR={socket.gethostname()}, for every rank ({error})"
        )
    return UserError(
        f"{_who(place)}: nobody answered at {where} within {seconds:g} s, where rank 0 should be; "
        f"either rank 0 has ended, and says why, or it is on another machine: set MASTER_ADDR to that one, for every "
        f"rank ({error})"
    )
