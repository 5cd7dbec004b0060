"""In: the store of all ranks, on a rank that ends. Out: a line that names the ranks that are not heard of.
Does not end the process (base/ending.py does). On one machine the launcher names a rank that stands still."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress

from codescent.base.ending import within
from codescent.base.output import warn
from codescent.base.rank import Rank
from codescent.meeting.store import Store, StoreError

ANSWER_S = 1.0
"""Seconds in which the store answers, if a link leads to it."""
GRACE_S = 2.0
"""Seconds for the others to say that they end, too. gloo closes all connections of a rank whose wait is over, so ranks
that wait for it end at once. With ANSWER_S it is less than FREE_S, after which the process ends."""
ENDS = "ends: rank "


def tell(store: Store, this_rank: Rank, living: Sequence[int], *, lost_peer: bool) -> None:
    """Say at the store that this rank ends. If ranks end because of a lost peer, one of them names the silent ones.

    Takes at most ANSWER_S and GRACE_S, whatever link is cut.

    Args:
        store: of the run.
        this_rank: this process among the ranks.
        living: the ranks with which it trains.
        lost_peer: whether it ends because another rank does not answer.
    """
    answered: list[bool] = []

    def say() -> None:
        with suppress(StoreError):  # rank 0 has ended
            store.set(f"{ENDS}{this_rank.rank}", "")
            answered.append(True)

    within(ANSWER_S, say)
    if not lost_peer:
        return
    if answered:
        with suppress(StoreError):  # rank 0 has ended, and has named them
            _name(store, living)
    else:
        warn(
            f"codescent: rank {this_rank.rank} cannot reach rank 0 at {this_rank.master_addr}: it has ended, or the "
            "link of one of the two is cut"
        )


def _name(store: Store, living: Sequence[int]) -> None:
    """Wait until all ranks have said that they end. Name those that have not: the first rank that comes so far does."""
    keys, end_s = [f"{ENDS}{rank}" for rank in living], time.monotonic() + GRACE_S
    while not store.check(keys) and time.monotonic() < end_s:
        time.sleep(0.1)
    silent = [rank for rank, key in zip(living, keys, strict=True) if not store.check([key])]
    if silent and store.add("silent ranks named", 1) == 1:
        hosts = [json.loads(store.get(f"rank{rank}"))["host"] for rank in silent]
        named = ", ".join(f"rank {rank} (on {host})" for rank, host in zip(silent, hosts, strict=True))
        which = "it stands still, or its link" if len(silent) == 1 else "they stand still, or their link"
        warn(f"codescent: the others waited in vain for {named}: {which} is cut")
