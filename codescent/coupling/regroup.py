"""In: workers of asynchronous servers that have died, or come again. Out: process groups of those that are there.
Does not see a process end (launch/local.py does) and does not give out work again (parameter_server.py does)."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import Any

from codescent.base.errors import RunFailed
from codescent.coupling.failure_detector import SHARE
from codescent.coupling.membership import LostWorker, MembershipChange, RejoinedWorker
from codescent.coupling.parameter_server import WeightServer
from codescent.coupling.services import RunRanks
from codescent.meeting.store import StoreError
from codescent.plan import Plan

LOOK_S = 0.002, 0.02
"""Seconds between two looks of the first server whether the workers have come: in memory, in the store."""


def regroup(world: RunRanks, plan: Plan, server: WeightServer | None, step: int) -> MembershipChange:
    """At the end of a segment, before its first collective: all ranks learn who has died since the last one and who has
    come again, and make process groups of those that are there. The first server decides, so that all make the same.

    It decides when each worker has come here or has died. Who dies later is not in its list. Collectives are under way
    then, so this death ends the run. The launcher sees in its page that the dead rank met the others. Nobody comes
    again then: the server lets a worker join only while a segment is under way.

    Where the death of a worker ends the run, and no launcher sees it, all ranks learn here whose death it was.

    Returns:
        those that have died and those that have come; on every rank. A worker may be in both.

    Raises:
        RunFailed: on every rank: the run cannot go on without a worker; or on this one: the others go on without it.
    """
    if not plan.servers or (world.pages is not None and not plan.layout.can_lose_workers):
        return MembershipChange()
    key, changes = f"changes {step}", None
    try:
        _come(world, step)
        if server is not None and server.index == 0:
            changes = _changes(world, plan, server, step)
            world.store.set(key, json.dumps(changes))
        changes = json.loads(world.store.get(key)) if changes is None else changes
    except StoreError as error:
        raise RunFailed(f"rank {world.this_rank.rank} waits for the others after step {step}: {error}") from error
    if changes["over"]:
        raise RunFailed(changes["over"])
    if world.this_rank.rank not in changes["living"]:
        raise RunFailed(f"rank {world.this_rank.rank} was taken for dead: the others have gone on without it")
    lost, joined = changes["lost"], changes["joined"]
    if lost or joined:
        world.go_on_with(changes["living"], plan, f"step {step}")
        if server is not None:
            server.group = world.servers
    return MembershipChange(tuple(LostWorker(**one) for one in lost), tuple(RejoinedWorker(**one) for one in joined))


def _changes(world: RunRanks, plan: Plan, server: WeightServer, step: int) -> dict[str, Any]:
    """What the first server decides: who lives, has died and has come, and why the run is over, if it is."""
    living, over = [], ""
    try:
        living = _wait_for_workers(world, plan, server, step)
    except RunFailed as error:
        over = str(error)
    lost, joined = ([asdict(one) for one in kind] for kind in server.membership.take())
    return {"living": living, "lost": lost, "joined": joined, "over": over}


def _wait_for_workers(world: RunRanks, plan: Plan, server: WeightServer, step: int) -> list[int]:
    """Wait until each worker meets the others after this step, or is dead. The server's threads answer meanwhile.

    Returns:
        the ranks that are there, in order.
    """
    end_s, look_s = time.monotonic() + SHARE * world.timeout.total_seconds(), LOOK_S[world.pages is None]
    there: set[int] = set()
    while True:
        server.raise_failure()
        server.look_for_dead()
        workers = [rank for rank in range(plan.mesh.world_size) if rank not in server.membership.absent]
        there |= {rank for rank in workers if rank not in there and _has_come(world, rank, step)}
        late = [rank for rank in workers if rank not in there]
        if not late:
            return sorted({*workers, *plan.servers})
        if time.monotonic() > end_s:
            ranks = ", ".join(f"rank {rank}" for rank in late)
            raise RunFailed(f"{ranks}: did not meet the others after step {step} within parallel.timeout_s")
        time.sleep(look_s)


def _come(world: RunRanks, step: int) -> None:
    """Say that this rank has come to the meeting after a step: in the launcher's memory, or in the store."""
    world.meets(step)
    if world.pages is None:
        world.store.set(_key(world.this_rank.rank, step), "1")


def _has_come(world: RunRanks, rank: int, step: int) -> bool:
    if world.pages is None:
        return world.store.check([_key(rank, step)])
    return world.pages.read(rank).meets == step


def _key(rank: int, step: int) -> str:
    return f"rank {rank} meets {step}"
