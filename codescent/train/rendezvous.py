"""In: a rank's place. Out: the store at which all ranks meet, and what they learn there of each other.
Does not make process groups (world does) and chooses no device (devices does)."""

from __future__ import annotations

import errno
import json
import os
import socket
import sys
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import (  # type: ignore[attr-defined]
    DistNetworkError,
    DistStoreError,
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
)

from codescent.base.errors import UserError
from codescent.base.rank import LOOPBACK, Rank
from codescent.train.devices import refusal


@dataclass(frozen=True)
class Neighbours:
    """The first rank of each machine, and how many ranks may use this one's cores (some launchers bind each rank)."""

    leaders: list[int]
    sharing: int


def meet(place: Rank, timeout: timedelta) -> Store:
    """The store of all ranks, once all are connected to it. Rank 0 serves it, unless torchrun does.

    Raises:
        UserError: the ranks do not find each other in time, or the port is taken.
    """
    if place.world_size == 1:
        return HashStore()
    serves = place.rank == 0 and not place.agent_store
    listening = _listening(place) if serves else None
    try:
        store = TCPStore(
            place.master_addr, place.master_port, place.world_size, serves, timeout, master_listen_fd=listening
        )
    except DistNetworkError as error:
        if "EADDRINUSE" in str(error):
            raise _taken(place, error) from error
        if "timed out" not in str(error):
            raise  # a connection that broke: another rank has ended, and says why
        raise _unreached(place, timeout, serves, error) from error
    except DistStoreError as error:
        raise UserError(
            f"{_who(place)}: not every rank has come to {place.master_addr}:{place.master_port} within "
            f"{timeout.total_seconds():g} s ({error}); either one has ended, and says why, or cannot reach this "
            "machine by that address: set MASTER_ADDR, for every rank"
        ) from error
    # After a restart torchrun's store still holds the addresses of the dead ranks: each attempt has its own keys. So
    # has each job: two may have come by the same port.
    return PrefixStore(f"{place.job} attempt{place.attempt}".lstrip(), store)


def _listening(place: Rank) -> int | None:
    """A socket for rank 0 to serve the store on; None: torch opens one, on which any machine can connect.

    The store asks for no password: where every rank is on this machine, no other may reach it.
    """
    if place.store_fd is not None or place.master_addr != LOOPBACK:
        return place.store_fd
    try:
        return socket.create_server((LOOPBACK, place.master_port), backlog=max(128, place.world_size)).detach()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise _taken(place, error) from error
        raise


def compare(store: Store, place: Rank, wanted: str, device: str) -> Neighbours:
    """Rank 0 compares the devices and cores of all ranks. Collective, through a fresh store.

    `wanted` is train.device; `device` is this rank's, by `devices.name_of`.

    Raises:
        UserError: on every rank: two have the same device, some have none, or a rank does not come.
    """
    mine = {"device": device, "local_rank": place.local_rank, "cores": _cores()}
    store.set(f"rank{place.rank}", json.dumps(mine))
    try:
        if place.rank == 0:
            found = store.multi_get([f"rank{rank}" for rank in range(place.world_size)])
            store.set("ranks", json.dumps(_compared([json.loads(one) for one in found], wanted)))
        compared = json.loads(store.get("ranks"))
    except (DistStoreError, DistNetworkError) as error:
        raise UserError(
            f"rank {place.rank} of {place.world_size} on {socket.gethostname()}: not every rank that came to "
            f"{place.master_addr}:{place.master_port} said who it is ({error}); one has ended, and says why, or "
            "another job is at this port: set MASTER_PORT to a free one, for every rank"
        ) from error
    if compared["refusal"]:
        raise UserError(compared["refusal"])
    return Neighbours(compared["leaders"], compared["sharing"][place.rank])


def _compared(ranks: list[dict[str, object]], wanted: str) -> dict[str, object]:
    cores = [rank["cores"] for rank in ranks]
    return {
        "refusal": refusal([str(rank["device"]) for rank in ranks], wanted),
        "leaders": [number for number, rank in enumerate(ranks) if rank["local_rank"] == 0],
        "sharing": [cores.count(mine) for mine in cores],
    }


def _cores() -> str:
    """The cores of this machine that this process may use."""
    mask = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []
    return f"{socket.gethostname()} {','.join(map(str, mask))}"


def _who(place: Rank) -> str:
    by = f", numbered by {place.launcher}," if place.launcher else ""
    return f"rank {place.rank} of {place.world_size}{by} on {socket.gethostname()}"


def _taken(place: Rank, error: Exception) -> UserError:
    return UserError(
        f"{_who(place)}: cannot listen at port {place.master_port}, which is taken; set MASTER_PORT to a free one, for "
        f"every rank ({error})"
    )


def _unreached(place: Rank, timeout: timedelta, serves: bool, error: Exception) -> UserError:
    where = f"{place.master_addr}:{place.master_port}"
    if serves:
        return UserError(
            f"{_who(place)}: listens at port {place.master_port}, but is not reached at {where}, where the others look "
            f"for it: that is not this machine; set MASTER_ADDR={socket.gethostname()}, for every rank ({error})"
        )
    return UserError(
        f"{_who(place)}: nobody answered at {where} within {timeout.total_seconds():g} s, where rank 0 should be; "
        f"either rank 0 has ended, and says why, or it is on another machine: set MASTER_ADDR to that one, for every "
        f"rank ({error})"
    )
