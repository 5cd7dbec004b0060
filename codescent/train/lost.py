"""In: workers that have died in a run with asynchronous servers. Out: the others go on without them.
Does not see a process end (launch/local.py does) and does not give out work again (serve.py does)."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from codescent.base.beats import Beats
from codescent.plan import Plan
from codescent.train.world import World

if TYPE_CHECKING:
    from codescent.train.open import OpenRun
    from codescent.train.serve import Serving


LOOK_S = 0.002
"""Seconds between two looks of the first server whether the workers have come."""


@dataclass(frozen=True)
class Death:
    """When a rank died, by time.monotonic as the launcher saw it, and the steps that it had done."""

    moment_s: float
    position: float


@dataclass(frozen=True)
class Lost:
    """A worker without which the run goes on.

    Attributes:
        rank: of the worker.
        host: its machine.
        step: in which it died (from 1).
        noticed_s: seconds from its death until its work could be given out again.
    """

    rank: int
    host: str
    step: int
    noticed_s: float

    @classmethod
    def of(cls, rank: int, death: Death) -> Lost:
        """The launcher sees only processes of this machine."""
        noticed_s = round(time.monotonic() - death.moment_s, 3)
        return cls(rank, socket.gethostname(), int(death.position) + 1, noticed_s)


def deaths(beats: Beats, workers: int) -> dict[int, Death]:
    """The workers that have died, as the launcher has seen it."""
    found = {rank: beats.lost(rank) for rank in range(workers)}
    return {rank: Death(*lost) for rank, lost in found.items() if lost is not None}


def go_on_without_lost(world: World, plan: Plan, serving: Serving | None, step: int) -> list[Lost]:
    """At the end of a segment, before its first collective: all ranks learn who has died since the last one, and make
    process groups without them. The first server decides, so that all ranks make the same.

    It decides when each worker has come here or has died. Who dies later is not in its list. Collectives are under way
    then, so this death ends the run. The launcher sees in the beats that the dead rank met the others.

    Returns:
        those that have died; on every rank.
    """
    if world.beats is None or not plan.layout.can_lose_workers:
        return []
    key = f"lost {step}"
    world.meets(step)
    if serving is not None and serving.index == 0:
        _wait_for_workers(world, plan, serving, step)
        new = [asdict(lost) for rank, lost in sorted(serving.lost.items()) if rank in world.living]
        world.store.set(key, json.dumps(new))
    found = [Lost(**one) for one in json.loads(world.store.get(key))]
    if found:
        world.go_on_without({lost.rank for lost in found}, plan)
        if serving is not None:
            serving.group = world.servers
    return found


def _wait_for_workers(world: World, plan: Plan, serving: Serving, step: int) -> None:
    """Wait until each worker meets the others after this step, or has died. The server's threads answer meanwhile."""
    assert world.beats is not None
    workers = [rank for rank in world.living if not plan.only_serves(rank)]
    while True:
        serving.raise_failure()
        serving.look_for_dead()
        if all(rank in serving.lost or world.beats.meets(rank) == step for rank in workers):
            return
        time.sleep(LOOK_S)


def report_lost(run: OpenRun, found: Sequence[Lost]) -> None:
    """Write an event for each worker that has died."""
    for lost in found:
        if run.folder is not None:
            run.folder.event("worker_lost", **asdict(lost))
