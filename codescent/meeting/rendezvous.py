"""In: a rank, as its launcher has numbered it. Out: a connection to the store of all ranks of this start of the run.
Does not look for the other ranks (search.py does), does not compare them (compared.py), creates no process groups."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

from codescent.base.errors import UserError
from codescent.base.loopback import refuse_without_loopback
from codescent.base.rank import LOOPBACK, Rank
from codescent.meeting.addresses import is_local
from codescent.meeting.agent_store import OpenAgent
from codescent.meeting.search import Search, about
from codescent.meeting.store import LocalStore, Store, StoreError
from codescent.meeting.store_server import StoreServer

TELLS = timedelta(seconds=5)
"""How long a rank that has failed looks for those that may wait for it."""


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
        self.store.close()
        if self.server is not None:
            self.server.close()


def meet(this_rank: Rank, timeout: timedelta, open_agent: OpenAgent, listen: str | None = None) -> Meeting:
    """Connect to the store of all ranks. Returns when all ranks of this start are connected (members.py).

    Rank 0 serves the store, to ranks that prove that they know the run's token.

    Args:
        this_rank: this process among the ranks.
        timeout: how long to wait for the other ranks (parallel.meet_s).
        open_agent: opens the store of torchrun's agent, if there is one.
        listen: parallel.listen; None: auto.

    Raises:
        UserError: this rank cannot reach rank 0 in time, has another token than rank 0, or finds the port taken; a rank
            does not come; two processes say that they are the same rank; all ranks are on this machine, and it has no
            loopback. gloo needs it also for a single rank.
    """
    refuse_unreachable(this_rank)
    if this_rank.world_size == 1:
        return Meeting(LocalStore(timeout))
    search = Search(this_rank, timeout.total_seconds(), listen, open_agent)
    try:
        store = search.join()
        store.set_timeout(timeout)
        return Meeting(store, search.server, search.address(store), search.key)
    except BaseException:
        search.close()
        raise


def reach(this_rank: Rank, timeout: timedelta, open_agent: OpenAgent) -> Meeting:
    """Connect to the store, on a rank that fails before the ranks have met, and tell those that wait for it.

    Raises UserError: as `meet`.
    """
    refuse_unreachable(this_rank)
    search = Search(this_rank, timeout.total_seconds(), None, open_agent)
    try:
        store = search.connect()
    except BaseException:
        search.close()
        raise
    with suppress(StoreError):  # rank 0 has ended
        store.meet({**about(this_rank), "failed": True})
    store.set_timeout(timeout)
    return Meeting(store, search.server, store.address(), search.key)


def refuse_unreachable(this_rank: Rank) -> None:
    """Raise UserError if all ranks are on this machine, which has no loopback."""
    if is_local(this_rank):
        refuse_without_loopback()


def tell_those_who_wait(this_rank: Rank, open_agent: OpenAgent) -> None:
    """This rank has failed before the ranks have met: the others, if some wait in `meet`, shall not wait longer."""
    with suppress(OSError, RuntimeError, UserError):  # nobody waits, or rank 0 has ended
        meeting = reach(this_rank, TELLS, open_agent)
        if this_rank.rank == 0:  # it serves the store: the others ask again and again
            time.sleep(TELLS.total_seconds())
        meeting.close()
