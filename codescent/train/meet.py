"""In: a rank's place. Out: the store at which all ranks meet; where they do not, what is wrong and what would be right.
Does not make process groups (world does)."""

from __future__ import annotations

import errno
import socket
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
        raise _too_few(place, timeout, error) from error
    # After a restart torchrun's store still holds the addresses of the dead ranks: each attempt has its own keys. So
    # has each job: two may have come by the same port.
    return PrefixStore(f"{place.job} attempt{place.attempt}".lstrip(), store)


def _listening(place: Rank) -> int | None:
    """A socket for rank 0 to serve the store on; None: torch opens one, on which any machine can connect.

    Nobody asks for a password there. Where every rank is on this machine, no other is to reach it; our own launcher has
    opened the socket by then.
    """
    if place.store_fd is not None or place.master_addr != LOOPBACK:
        return place.store_fd
    try:
        return socket.create_server((LOOPBACK, place.master_port), backlog=max(128, place.world_size)).detach()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise _taken(place, error) from error
        raise


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


def _too_few(place: Rank, timeout: timedelta, error: Exception) -> UserError:
    where = f"{place.master_addr}:{place.master_port}"
    return UserError(
        f"{_who(place)}: not every rank has come to {where} within {timeout.total_seconds():g} s ({error}); either one "
        f"has ended, and says why, or cannot reach this machine by that address: set MASTER_ADDR, for every rank"
    )
