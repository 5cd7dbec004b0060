"""In: the store of a run that is under way, a process that was started again for a dead worker. Out: it trains, too.
Does not start the process (launch/local.py does) and does not let it in (serve_requests.py does)."""

from __future__ import annotations

from codescent.base.errors import UserError
from codescent.base.progress import OwnPage
from codescent.strategies.worker import Worker
from codescent.train.world import World

WAITS = -1
"""The stage of a worker that waits to be let in: nobody waits for it, so it is never behind others of its stage."""


def refuse_restarts(restarts: int, world: World) -> None:
    """Raise UserError if nobody would start a rank again."""
    if restarts and world.pages is None:
        by = f", and {world.place.launcher} has started this one" if world.place.launcher else ""
        raise UserError(
            f"parallel.restarts = {restarts}: only `codescent train --ranks` starts ranks of its machine again{by}; "
            "set parallel.restarts to 0"
        )


def join(world: World, worker: Worker) -> int:
    """Wait until the first server lets this worker in, while a segment is under way. Returns the steps that are done.

    From its first word on, the launcher counts another death of this worker as that of a worker that trained.
    """
    own = OwnPage.current
    assert world.pages is not None
    assert own is not None
    dead = world.pages.read(world.place.rank)
    assert dead.died_s, "this rank was started again, and has not died"
    own.at(dead.position, WAITS)
    own.come_again()
    return worker.join(dead.died_s, dead.position)
