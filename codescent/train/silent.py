"""In: the error that ends this rank, the store of all ranks. Out: a line that names the ranks that are not heard of.
Does not end the process (base/ending.py does). On one machine the launcher names a rank that stands still."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress

from torch.distributed import DistBackendError, DistError, Store  # type: ignore[attr-defined]

from codescent.base.ending import within
from codescent.base.output import warn
from codescent.base.rank import Rank

GLOO = "/gloo/"
"""In the words of each error of a gloo connection: the path of the source file, such as gloo/transport/tcp/pair.cc."""
ENFORCE = "[enforce fail"
OF_A_CONNECTION = ("connect", "closed", "timed out", "timeout", "reset by peer", "broken pipe")
"""gloo reports what is wrong on this rank, such as an unknown interface, and some lost connections, by one macro."""
OF_THIS_RANK = ("ncclUnhandledCudaError", "ncclInvalidArgument", "ncclInvalidUsage", "ncclInternalError")
"""Results of NCCL that speak of this rank. ncclRemoteError, ncclSystemError and its timeouts speak of another one."""
ANSWER_S = 1.0
"""Seconds in which the store answers, if a link leads to it."""
GRACE_S = 2.0
"""Seconds for the others to say that they end, too. gloo closes all connections of a rank whose wait is over, so ranks
that wait for it end at once. With ANSWER_S it is less than FREE_S, after which the process ends."""
ENDS = "ends: rank "


def is_lost_peer(error: BaseException | None) -> bool:
    """Whether an error, or one that caused it, only says that another rank does not answer: the cause is there."""
    if error is None:
        return False
    said = str(error)
    if isinstance(error, DistBackendError):
        return not any(own in said for own in OF_THIS_RANK)
    if isinstance(error, DistError):
        return True
    if isinstance(error, RuntimeError) and GLOO in said:
        return ENFORCE not in said or any(word in said.lower() for word in OF_A_CONNECTION)
    return is_lost_peer(error.__cause__)


def tell(store: Store, place: Rank, living: Sequence[int], error: BaseException) -> None:
    """Say at the store that this rank ends. After an error of a lost peer, one of the ranks names the silent ones.

    Takes at most ANSWER_S and GRACE_S, whatever link is cut. `living`: those with which this rank trains.
    """
    answered: list[bool] = []

    def say() -> None:
        with suppress(RuntimeError):  # rank 0 has ended
            store.set(f"{ENDS}{place.rank}", "")
            answered.append(True)

    within(ANSWER_S, say)
    if not is_lost_peer(error):
        return
    if answered:
        with suppress(RuntimeError):  # rank 0 has ended, and has named them
            _name(store, living)
    else:
        warn(
            f"codescent: rank {place.rank} cannot reach rank 0 at {place.master_addr}: it has ended, or the link of "
            "one of the two is cut"
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
