"""In: a rank that another launcher than ours has started, the store. Out: its page, and a supervisor for its host.
Does not watch: launch/supervise.py does, in a process of its own, which the first rank of a host starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress

from codescent.base import stacks
from codescent.base.progress import OwnPage, Pages, shared_memory
from codescent.base.rank import Rank
from codescent.meeting.store import Store

DELAY_S = 5.0
"""Seconds from the meeting to the start of the supervisor. A run that is over by then needs none."""


def watch(this_rank: Rank, store: Store, leaders: Sequence[int]) -> None:
    """Open the page of this rank in memory that the first rank of its host makes. All ranks of the host call it.

    Where the memory cannot be shared (no Linux, or each rank has process numbers of its own) nobody watches.
    """
    if sys.platform != "linux" or this_rank.world_size == 1:
        return
    leader = _leader(this_rank, store, leaders)
    key, size = f"pages of {leader}", this_rank.world_size
    descriptor: int | None
    if this_rank.rank == leader:
        descriptor = shared_memory(size)
        store.set(key, json.dumps([os.getpid(), descriptor, os.fstat(descriptor).st_ino]))
        timer = threading.Timer(DELAY_S, _start, (descriptor, this_rank))
        timer.daemon = True
        timer.start()
    else:
        descriptor = stacks.borrowed(*json.loads(store.get(key)))
    if descriptor is not None:
        own = OwnPage(Pages(descriptor, size), this_rank.rank)
        own.answers(os.getpid(), stacks.listen_on_own_file())
        own.begin()


def _leader(this_rank: Rank, store: Store, leaders: Sequence[int]) -> int:
    """The first rank of this rank's host. Most launchers number the ranks of a host one after the other."""
    if (first := this_rank.rank - this_rank.local_rank) in leaders:
        return first
    host = json.loads(store.get(f"rank{this_rank.rank}"))["host"]
    return next(rank for rank in leaders if json.loads(store.get(f"rank{rank}"))["host"] == host)


def _start(descriptor: int, this_rank: Rank) -> None:
    """Start the supervisor, if the ranks have not parted by now. It ends when the last rank of the host has ended."""
    if OwnPage.current is None:
        return
    words = [sys.executable, "-P", "-m", "codescent.launch.supervise", str(this_rank.world_size)]
    words += [str(this_rank.local_world_size), str(descriptor)]
    with suppress(OSError):  # no process can be started: the ranks go on unwatched
        subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=[descriptor])
