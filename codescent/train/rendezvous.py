"""In: a rank, its device, and values that must be equal on all ranks (config, versions). Out: a connection to the store
of all ranks; an error on every rank if the values differ.
Does not create process groups (world.py does) or choose a device (devices.py does)."""

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
"""Seconds between two attempts to reach rank 0."""
STRANGER_S = 3.0
"""A rank tries again for this many seconds if another job answers at rank 0's port: that job may be about to end."""


@dataclass(frozen=True)
class Meeting:
    """This rank's connection to the store of the run.

    Attributes:
        store: holds small values that all ranks read and write.
        server: the thread that serves the store; None except on rank 0 of several ranks.
        address: of this machine, from which this rank has connected to rank 0.
        key: the secret of this start of the run.
    """

    store: Store
    server: StoreServer | None = None
    address: str = LOOPBACK
    key: bytes = b""

    def close(self) -> None:
        """Close the connection. Rank 0 closes its port, too, so that the next program can use it."""
        if isinstance(self.store, TokenStore):
            self.store.close()
        if self.server is not None:
            self.server.close()


@dataclass(frozen=True)
class Topology:
    """How the ranks are spread over machines.

    Attributes:
        leaders: the first rank of each machine.
        sharing: number of ranks that may run on the cores of this rank (some launchers bind each rank to cores).
    """

    leaders: list[int]
    sharing: int


def meet(place: Rank, timeout: timedelta) -> Meeting:
    """Connect to the store of all ranks. Rank 0 serves it, to ranks that prove that they know the run's token.

    Raises:
        UserError: this rank cannot reach rank 0 in time, has another token than rank 0, or finds the port taken.
    """
    if place.world_size == 1:
        return Meeting(HashStore())
    # The key is different for each start of each job, so that ranks of another job at the same port are rejected.
    # torchrun's agents count attempts separately, so their numbers may differ between machines.
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
    return Meeting(store, server, store.address(), key)


def _listening(place: Rank) -> socket.socket:
    """The socket on which rank 0 serves the store: on loopback, or on the interface that other machines reach."""
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
                f"{_who(place)}: cannot listen at port {port}, which is taken; set MASTER_PORT to a free port, for "
                f"every rank ({error})"
            ) from error
        raise UserError(f"{_who(place)}: cannot listen at {address}:{port} ({error}); set MASTER_ADDR") from error


def _address(place: Rank) -> tuple[str, int]:
    """The address and port of rank 0, from the launcher's environment variables."""
    return (LOOPBACK if is_local(place) else place.master_addr), place.master_port


def _address_at_agent(place: Rank, timeout: timedelta, listener: socket.socket | None) -> _Where:
    """Return a function that reads the address and port of rank 0 from the store of torchrun's agent.

    Rank 0 writes its address there. Anyone can write to that store, as it needs no token. A false address can only
    prevent that the ranks meet: at any address, a rank proves that it knows the token without sending it.
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
        f"{_who(place)}: torchrun's store at {place.master_addr}:{place.master_port} has no address of rank 0 after "
        f"{timeout.total_seconds():g} s ({error}); either rank 0 has ended (see its error message), or torchrun has"
    )


def _join(place: Rank, where: _Where, key: bytes, timeout: timedelta) -> TokenStore:
    """Connect to rank 0, and try again until it listens. Raises UserError: it does not in time, or has another key."""
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
                    f"{_who(place)}: the process that listens at {_shown(where())} has another token than this rank. "
                    f"Either another job uses this port: set MASTER_PORT to a free port, for every rank. Or the "
                    f"machines have different files {token.FILE}: copy one to all machines, or set {token.TOKEN} to "
                    "the same text, hard to guess, for every rank"
                ) from error
        except OSError as error:
            if spent_s > seconds:
                raise _unreached(place, _shown(where()), seconds, error) from error
        time.sleep(AGAIN_S)


def compare(store: Store, place: Rank, wanted: str, device: str, facts: Mapping[str, Any]) -> Topology:
    """Send this rank's device, host, cores and facts to rank 0, which compares those of all ranks. Collective.

    A rank that comes late finds what rank 0 said of its predecessor, and compares its own facts with those of rank 0.

    Args:
        store: of the run, not used before.
        place: this process among the ranks.
        wanted: train.device.
        device: name of this rank's device, by `devices.name_of`.
        facts: JSON values by name, which must be equal on all ranks.

    Raises:
        UserError: on every rank: two ranks have the same device, some have none, a fact differs, or a rank is missing.
    """
    mine = {
        "rank": place.rank,
        "device": device,
        "local_rank": place.local_rank,
        "host": socket.gethostname(),
        "cores": _cores(),
    }
    try:
        store.set(f"rank{place.rank}", json.dumps({**mine, "facts": dict(facts)}))
        if place.rank == 0:
            found = store.multi_get([f"rank{rank}" for rank in range(place.world_size)])
            store.set("ranks", json.dumps(_compared([json.loads(one) for one in found], wanted)))
        compared = json.loads(store.get("ranks"))
        stay_until_read(store, place, "ranks")
        first = json.loads(store.get("rank0")) if place.late else None
    except DistError as error:
        raise UserError(
            f"{_who(place)}: {_absent(store, place)} ({error}). Either a rank has ended (see its error message), or a "
            "rank cannot reach rank 0: set MASTER_ADDR, for every rank. Or another job uses this port: set MASTER_PORT "
            "to a free port"
        ) from error
    problems = compared["problems"] if first is None else differences([first, {**mine, "facts": dict(facts)}])
    if problems:
        raise UserError(*problems)
    return Topology(compared["leaders"], compared["sharing"][place.rank])


def stay_until_read(store: Store, place: Rank, what: str) -> None:
    """Wait, on rank 0, until all ranks have read the value `what`: the store ends with rank 0. Collective."""
    if place.rank:
        store.set(f"{what} read by {place.rank}", "")
        return
    with contextlib.suppress(DistError):  # a rank that has ended does not read the value
        store.multi_get([f"{what} read by {rank}" for rank in range(1, place.world_size)])


def _absent(store: Store, place: Rank) -> str:
    """A sentence that names the missing ranks, or says only that some are missing if the store does not answer."""
    with contextlib.suppress(DistError):
        if isinstance(store, TokenStore):
            present = store.there([f"rank{rank}" for rank in range(place.world_size)])
            absent = [str(rank) for rank, is_present in enumerate(present) if not is_present]
            if absent:
                return f"not all ranks have connected: missing {', '.join(absent)} of {place.world_size}"
    return "not all ranks have connected"


def _compared(ranks: list[dict[str, Any]], wanted: str) -> dict[str, object]:
    cores = [rank["cores"] for rank in ranks]
    devices = refusal([str(rank["device"]) for rank in ranks], wanted)
    return {
        "problems": [*([devices] if devices else []), *differences(ranks)],
        "leaders": [number for number, rank in enumerate(ranks) if rank["local_rank"] == 0],
        "sharing": [cores.count(mine) for mine in cores],
    }


def differences(ranks: list[dict[str, Any]]) -> list[str]:
    """One error sentence for each fact that differs between ranks. Each of `ranks` has "host" and "facts",
    and "rank" unless it is its index."""
    problems = []
    for name in dict.fromkeys(name for rank in ranks for name in rank["facts"]):
        who: dict[str, list[str]] = {}
        for number, rank in enumerate(ranks):
            value = json.dumps(rank["facts"][name]) if name in rank["facts"] else "absent"
            who.setdefault(value, []).append(f"{rank.get('rank', number)} ({rank['host']})")
        if len(who) > 1:
            listed = "; ".join(f"{value} on {_ranks(numbers)}" for value, numbers in who.items())
            problems.append(f"the ranks have different runs: {name} is {listed}: start every rank with the same value")
    return problems


def _ranks(numbers: list[str]) -> str:
    shown = ", ".join(numbers[:4]) + (f" and {len(numbers) - 4} more" if len(numbers) > 4 else "")
    return f"rank{'s' if len(numbers) > 1 else ''} {shown}"


def _cores() -> str:
    """Host name and numbers of the cores that this process may use; equal for two processes that share all cores."""
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
            f"{_who(place)}: listens at port {place.master_port}, but cannot be reached at {where}, where the other "
            f"ranks connect: this address is not of this machine; set MASTER_ADDR={socket.gethostname()}, for every "
            f"rank ({error})"
        )
    return UserError(
        f"{_who(place)}: rank 0 did not answer at {where} within {seconds:g} s ({error}); either rank 0 has ended (see "
        f"its error message), or it is on another machine: set MASTER_ADDR to that machine, for every rank"
    )
