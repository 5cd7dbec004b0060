"""In: the store of ranks that have met; values to be equal on all. Out: who is on which machine; one error for all.
Does not bring the ranks together (rendezvous.py does)."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from codescent.base.errors import UserError
from codescent.base.rank import Rank
from codescent.meeting.members import listed
from codescent.meeting.store import Store, StoreError

FIRST_ENDS_S = 2.0
"""Seconds in which rank 0 prints what all ranks have found."""


@dataclass(frozen=True)
class Topology:
    """How the ranks are spread over machines.

    Attributes:
        leaders: the first rank of each machine.
        sharing: number of ranks that may run on the cores of this rank (some launchers bind each rank to cores).
    """

    leaders: list[int]
    sharing: int


def compare(
    store: Store, this_rank: Rank, device: str, facts: Mapping[str, Any], refuse_devices: Callable[[list[str]], str]
) -> Topology:
    """Send this rank's device, host, cores and facts to rank 0, which compares those of all ranks. Collective.

    A rank that comes late finds what rank 0 said of its predecessor, and compares its own facts with those of rank 0.

    Args:
        store: of the run, not used before.
        this_rank: this process among the ranks.
        device: name of this rank's device.
        facts: JSON values by name, which must be equal on all ranks.
        refuse_devices: says what is wrong with the names of all ranks' devices; "": nothing.

    Raises:
        UserError: on every rank: two ranks have the same device, some have none, a fact differs, or a rank is missing.
    """
    mine = {
        "rank": this_rank.rank,
        "device": device,
        "local_rank": this_rank.local_rank,
        "host": socket.gethostname(),
        "cores": _cores(),
    }
    try:
        store.set(f"rank{this_rank.rank}", json.dumps({**mine, "facts": dict(facts)}))
        if this_rank.rank == 0:
            found = store.multi_get([f"rank{rank}" for rank in range(this_rank.world_size)])
            store.set("ranks", json.dumps(_compared([json.loads(one) for one in found], refuse_devices)))
        compared = json.loads(store.get("ranks"))
        stay_until_read(store, this_rank, "ranks")
        first = json.loads(store.get("rank0")) if this_rank.late else None
    except StoreError as error:
        raise UserError(
            f"{this_rank.here()}: a rank has ended since all were there (see its error message), or does not answer "
            f"({error})"
        ) from error
    problems = compared["problems"] if first is None else differences([first, {**mine, "facts": dict(facts)}])
    if problems:
        if this_rank.rank:
            store.wait_for_end(FIRST_ENDS_S)  # rank 0 prints it; a launcher may end all ranks when one has ended
        refused = UserError(*problems)
        refused.everywhere = first is None
        raise refused
    return Topology(compared["leaders"], compared["sharing"][this_rank.rank])


def stay_until_read(store: Store, this_rank: Rank, what: str) -> None:
    """Wait, on rank 0, until all ranks have read the value `what`: the store ends with rank 0. Collective."""
    if this_rank.rank:
        store.set(f"{what} read by {this_rank.rank}", "")
        return
    with contextlib.suppress(StoreError):  # a rank that has ended does not read the value
        store.multi_get([f"{what} read by {rank}" for rank in range(1, this_rank.world_size)])


def _compared(ranks: list[dict[str, Any]], refuse_devices: Callable[[list[str]], str]) -> dict[str, object]:
    cores = [rank["cores"] for rank in ranks]
    devices = refuse_devices([str(rank["device"]) for rank in ranks])
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
            values = "; ".join(f"{value} on {listed(ranks)}" for value, ranks in who.items())
            problems.append(f"the ranks have different runs: {name} is {values}: start every rank with the same value")
    return problems


def _cores() -> str:
    """Host name and numbers of the cores that this process may use; equal for two processes that share all cores."""
    mask = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []
    return f"{socket.gethostname()} {','.join(map(str, mask))}"
