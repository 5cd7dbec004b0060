"""In: a rank that another launcher than ours has started, the store. Out: its page, and a supervisor for its host.
Does not watch: launch/supervise.py does, in a process of its own, which the first rank of a host starts."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress

from codescent.base import stacks
from codescent.base.errors import UserError
from codescent.base.proc import stat_of
from codescent.base.progress import OwnPage, Pages, shared_memory
from codescent.base.rank import Rank
from codescent.meeting.addresses import ALL, is_local, listening_address
from codescent.meeting.store import Store
from codescent.transport.sockets import listen_at

HUB = "hub of supervisors"
Waits = tuple[float | None, float | None]
"""Seconds: parallel.stopped_s and parallel.timeout_s; None: not given."""
DELAY_S = 5.0
"""Seconds from the meeting to the start of the supervisor. A run that is over by then needs none."""


def watch(
    this_rank: Rank,
    store: Store,
    leaders: Sequence[int],
    given: Pages | None,
    listen: str | None = None,
    waits: Waits = (None, None),
) -> None:
    """Open the page of this rank: in the memory of its launcher, or in memory that the first rank of its host makes.

    Where the memory cannot be shared (no Linux, or each rank has process numbers of its own) nobody watches.

    Args:
        this_rank: this process among the ranks. All ranks of the run call it.
        store: of the run.
        leaders: the first rank of each host.
        given: the memory of our launcher; None: another launcher has started the ranks.
        listen: parallel.listen.
        waits: how long others wait for a rank that is stopped: see `Stopped`.
    """
    if given is not None:
        own = OwnPage(given, this_rank.rank)
        if not is_local(this_rank):
            _share_hub(this_rank, store, leaders, given, given.hub)
    elif sys.platform == "linux" and this_rank.world_size > 1:
        listener = _listener(this_rank, listen)
        hub = "" if listener is None else " ".join(map(str, listener.getsockname()[:2]))
        descriptor = _memory(this_rank, store, leaders, listener, waits)
        if not is_local(this_rank):
            _share_hub(this_rank, store, leaders, _pages(descriptor, this_rank), hub)
        if descriptor is None:
            return
        own = OwnPage(Pages(descriptor, this_rank.world_size), this_rank.rank)
        own.answers(os.getpid(), stacks.listen_on_own_file())
    else:
        return
    own.begin()


def _memory(
    this_rank: Rank, store: Store, leaders: Sequence[int], listener: socket.socket | None, waits: Waits
) -> int | None:
    """The memory of the pages of this host, as a descriptor. Its first rank makes it, and starts the supervisor."""
    leader = _leader(this_rank, store, leaders)
    key = f"pages of {leader}"
    if this_rank.rank != leader:
        return stacks.borrowed(*json.loads(store.get(key)))
    descriptor = shared_memory(this_rank.world_size)
    store.set(key, json.dumps([os.getpid(), descriptor, os.fstat(descriptor).st_ino]))
    timer = threading.Timer(DELAY_S, _start, (descriptor, this_rank, listener, waits))
    timer.daemon = True
    timer.start()
    return descriptor


def _pages(descriptor: int | None, this_rank: Rank) -> Pages | None:
    return None if descriptor is None else Pages(descriptor, this_rank.world_size)


def _share_hub(this_rank: Rank, store: Store, leaders: Sequence[int], pages: Pages | None, hub: str) -> None:
    """Say on each host where the supervisor of the host of rank 0 listens. `hub`: it, on rank 0."""
    if this_rank.rank == 0:
        store.set(HUB, hub)
    if this_rank.rank in leaders and pages is not None:
        pages.hub = store.get(HUB).decode()


def _listener(this_rank: Rank, listen: str | None) -> socket.socket | None:
    """On rank 0 of several hosts: where the supervisors of other hosts connect, once there is one here."""
    if this_rank.rank or is_local(this_rank) or listen == ALL:
        return None
    with suppress(OSError, UserError):  # without it each supervisor speaks for its own host
        return listen_at(listening_address(this_rank, listen), 0, this_rank.world_size)
    return None


def _leader(this_rank: Rank, store: Store, leaders: Sequence[int]) -> int:
    """The first rank of this rank's host. Most launchers number the ranks of a host one after the other."""
    if (first := this_rank.rank - this_rank.local_rank) in leaders:
        return first
    host = json.loads(store.get(f"rank{this_rank.rank}"))["host"]
    return next(rank for rank in leaders if json.loads(store.get(f"rank{rank}"))["host"] == host)


def _start(descriptor: int, this_rank: Rank, listener: socket.socket | None, waits: Waits) -> None:
    """Start the supervisor, if the ranks have not parted by now. It ends when the last rank of the host has ended."""
    if OwnPage.current is None or not stat_of(os.getpid()):  # it would not learn that the ranks have ended
        return
    words = [sys.executable, "-P", "-m", "codescent.launch.supervise", str(this_rank.world_size)]
    words += [str(this_rank.local_world_size), str(descriptor)]
    words.append("-1" if listener is None else str(listener.fileno()))
    words.append(json.dumps(waits))
    passed = [descriptor, *([] if listener is None else [listener.fileno()])]
    with suppress(OSError):  # no process can be started: the ranks go on unwatched
        subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=passed)
    if listener is not None:
        listener.close()  # the supervisor has it
