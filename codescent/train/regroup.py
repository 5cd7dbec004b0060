"""In: workers of asynchronous servers that have died, or come again. Out: process groups of those that are there.
Does not see a process end (launch/local.py does) and does not give out work again (serve.py does)."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from codescent.base.errors import RunFailed
from codescent.plan import Plan
from codescent.train.crew import Joined, Lost
from codescent.train.patience import SHARE
from codescent.train.world import World

if TYPE_CHECKING:
    from codescent.train.open import OpenRun
    from codescent.train.serve import Serving


LOOK_S = 0.002
"""Seconds between two looks of the first server whether the workers have come."""


def regroup(world: World, plan: Plan, serving: Serving | None, step: int) -> tuple[list[Lost], list[Joined]]:
    """At the end of a segment, before its first collective: all ranks learn who has died since the last one and who has
    come again, and make process groups of those that are there. The first server decides, so that all make the same.

    It decides when each worker has come here or has died. Who dies later is not in its list. Collectives are under way
    then, so this death ends the run. The launcher sees in the beats that the dead rank met the others. Nobody comes
    again then: the server lets a worker join only while a segment is under way.

    Returns:
        those that have died and those that have come; on every rank. A worker may be in both.
    """
    if world.beats is None or not plan.layout.can_lose_workers:
        return [], []
    key = f"changes {step}"
    world.meets(step)
    if serving is not None and serving.index == 0:
        living = _wait_for_workers(world, plan, serving, step)
        changes = [[asdict(one) for one in kind] for kind in serving.crew.take()]
        world.store.set(key, json.dumps([living, *changes]))
    living, lost, joined = json.loads(world.store.get(key))
    if lost or joined:
        world.go_on_with(living, plan, f"step {step}")
        if serving is not None:
            serving.group = world.servers
    return [Lost(**one) for one in lost], [Joined(**one) for one in joined]


def _wait_for_workers(world: World, plan: Plan, serving: Serving, step: int) -> list[int]:
    """Wait until each worker meets the others after this step, or is dead. The server's threads answer meanwhile.

    Returns:
        the ranks that are there, in order.
    """
    assert world.beats is not None
    end_s = time.monotonic() + SHARE * world.timeout.total_seconds()
    while True:
        serving.raise_failure()
        serving.look_for_dead()
        workers = [rank for rank in range(plan.mesh.world_size) if rank not in serving.crew.absent]
        late = [rank for rank in workers if world.beats.meets(rank) != step]
        if not late:
            return [*workers, *plan.servers]
        if time.monotonic() > end_s:
            ranks = ", ".join(f"rank {rank}" for rank in late)
            raise RunFailed(f"{ranks}: did not meet the others after step {step} within parallel.timeout_s")
        time.sleep(LOOK_S)


def report_changes(run: OpenRun, lost: Sequence[Lost], joined: Sequence[Joined]) -> None:
    """Write an event for each worker that has died, and for each that has come again."""
    if run.folder is None:
        return
    for death in lost:
        run.folder.event("worker_lost", **asdict(death))
    for one in joined:
        run.folder.event("worker_joined", **asdict(one))
