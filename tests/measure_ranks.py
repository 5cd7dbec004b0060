"""In: one rank of some, which are on nodes of so many. Out: what `codescent measure` finds there, as a cluster file.
Does not assert anything (test_measure does) and starts no process (rank_server does)."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

from rank_server import Place

from codescent.base.errors import UserError
from codescent.base.rank import Rank
from codescent.measure.file import cluster_of, text_of
from codescent.measure.ranks import measure
from codescent.measure.table import summary
from codescent.train.world import World


def connected(place: Place, leaders: Sequence[int]) -> World:
    """The ranks, which are all on this machine, as if these were the first ones of nodes."""
    store_fd = os.dup(place.listener.fileno()) if place.rank == 0 else None
    port = place.listener.getsockname()[1]
    place.listener.close()
    rank = Rank(place.rank, place.rank, place.ranks, place.ranks, "127.0.0.1", port, store_fd=store_fd)
    world = World(rank, "cpu", 1, 60.0)
    world.leaders = list(leaders)
    return world


def measured(place: Place, leaders: list[int], seconds: float) -> dict[str, Any] | None:
    """Measure. Rank 0: the text of the file, what was measured, and what is printed."""
    told = list[str]()
    with connected(place, leaders) as world:
        found = measure(world, seconds, told.append)
        world.leave()
    if found is None:
        return None
    cluster = cluster_of("here", found)
    return {
        "text": text_of(cluster, found),
        "items": [{**dataclasses.asdict(one.item), "of_ranks": one.of_ranks} for one in found.items],
        "printed": list(summary(found, cluster)),
        "told": told,
    }


def refused(place: Place, leaders: list[int]) -> str:
    """What ranks are told that lie on nodes as no price takes them to."""
    with connected(place, leaders) as world:
        try:
            measure(world, 0.1, lambda what: None)
        except UserError as error:
            world.leave()
            return str(error)
    return ""
