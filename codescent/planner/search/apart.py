"""In: the fastest layouts of a search. Out: what replicas that send less would make of them: other trajectories.
Does not say whether a run learns as well so (docs/which.md has what was measured)."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from codescent.base.errors import UserError
from codescent.base.refusal import Change, Value
from codescent.build.accept import changed
from codescent.build.plan import build
from codescent.cost.price import Price, price
from codescent.cost.stage_memory import Fitting
from codescent.planner.period import NOTHING_DUE
from codescent.planner.search.found import Searched
from codescent.planner.search.space import DEGREES, MICROBATCH

SLOW = 0.1
"""Links are slow if the fastest layout waits for messages between nodes for such a share of its step."""
WANTED = 3
METHODS: tuple[Mapping[str, Value], ...] = (
    {"wire": "int8"},
    {"wire": "int4"},
    {"average_every": 16},
    {"average_every": 16, "wire": "int4"},
    {"average_every": 16, "wire": "sign"},
    {"gossip": "pairs", "gossip_every": 16},
)
"""Keys of [parallel] with which replicas send less: rows of the measurements in docs/which.md."""


class Apart(NamedTuple):
    """A layout whose replicas send less.

    Attributes:
        change: of the config.
        method: the part of it that makes another trajectory.
        price: of its plan.
    """

    change: Change
    method: Mapping[str, Value]
    price: Price


def apart(found: Searched, given: Collection[str]) -> list[Apart]:
    """The fastest layouts whose replicas send less, if links between nodes are slow; at most WANTED, each faster than
    the fastest of the search.

    `given`: keys of the config that keep their value.
    """
    best = found.best[0].price
    if best.parts.between_s < SLOW * best.step_s:
        return []
    priced = [one for change in _divisions(found) for one in _priced(found, change, given)]
    faster = sorted((one for one in priced if one.price.step_s < best.step_s), key=lambda one: one.price.step_s)
    distinct: dict[tuple[object, ...], Apart] = {}
    for one in faster:  # of each method the fastest division
        distinct.setdefault(tuple(one.method.items()), one)
    return list(distinct.values())[:WANTED]


def _divisions(found: Searched) -> Iterator[Change]:
    """Layouts with replicas: the fastest ones of the search as they are, and with one replica on each node, or more."""
    seen = set[tuple[object, ...]]()
    for one in found.best:
        mesh, each = one.layout.frame.mesh, one.price.cluster.devices
        nodes = max(1, mesh.world_size // each)
        for replicas in {mesh.dp_replicate, mesh.dp, math.gcd(mesh.dp, nodes)}:
            axes = {"parallel.dp_replicate": replicas, "parallel.dp_shard": mesh.dp // replicas}
            change = {**one.change.values, **axes}
            key = tuple(change[name] for name in (*DEGREES, MICROBATCH) if name in change)
            if replicas > 1 and key not in seen and not _contradicts(found, axes):
                seen.add(key)
                yield Change(change)


def _contradicts(found: Searched, axes: Mapping[str, int]) -> bool:
    """Whether a key that is given would have another value."""
    config = found.space.config.parallel
    named = ((name, degree) for name, degree in axes.items() if name in found.space.given)
    return any(getattr(config, name.partition(".")[2]) != degree for name, degree in named)


def _priced(found: Searched, change: Change, given: Collection[str]) -> Iterator[Apart]:
    space, first = found.space, found.best[0]
    for method in METHODS:
        keys = {f"parallel.{name}": value for name, value in method.items()}
        if any(name in given for name in keys):
            continue
        period = int(str(method.get("average_every", method.get("gossip_every", 1))))
        steps = period * math.ceil((space.config.train.num_steps or 1) / period)
        whole = Change({**change.values, **keys, **NOTHING_DUE, "train.num_steps": steps})
        try:
            plan = build(changed(space.start, whole), space.vocab_size, space.ranks)
        except (UserError, ValueError):  # a layout that cannot send less, such as a pipeline with gossip
            continue
        priced = price(plan, first.price.cluster, first.price.software)
        if priced.verdict is not Fitting.TOO_LARGE:
            yield Apart(Change({**change.values, **keys}), method, priced)
