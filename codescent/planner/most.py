"""In: a config, a key, a cluster. Out: the largest value of the key with which each rank fits in its device.
Does not change the layout (a search does) and does not run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from codescent.base.errors import UserError
from codescent.base.nearest import divisors
from codescent.base.refusal import Change
from codescent.build.accept import changed
from codescent.build.plan import build
from codescent.clusters.cluster import Cluster, Software
from codescent.cost.price import memory_of
from codescent.plan import Plan

if TYPE_CHECKING:
    from codescent.config.sections import Config

KEYS = ("train.microbatch_size", "data.seq_len", "model.num_layers")
"""Keys whose largest value can be asked for."""
POSITIONS, LAYERS = 128, 1
"""Steps in which sequences and models become larger."""
MOST_STEPS = 1 << 13
"""The largest number of steps that is tried: a million positions, thousands of layers."""


@dataclass(frozen=True)
class Most:
    """The largest value that fits.

    Attributes:
        value: None: the smallest does not fit.
        next_value: the next larger one that build takes; None: there is none.
        next_bytes: what its fullest rank would hold.
    """

    value: int | None
    next_value: int | None
    next_bytes: float


def most(config: Config, plan: Plan, key: str, cluster: Cluster, software: Software) -> Most:
    """The largest value of one of KEYS. Values that `build` refuses are passed over. What is tight counts as fitting.

    `plan`: of the config. Memory grows with each of the keys, so halves of the values are ruled out at once.
    """
    tried: dict[int, float | None] = {}

    def held_bytes(value: int) -> float | None:
        """Of the fullest rank; None: refused."""
        if value not in tried:
            tried[value] = _bytes_with(config, plan, _changes(config, key, value), cluster, software)
        return tried[value]

    values = sorted(_values(plan, key))
    best, larger = None, None
    low, high = 0, len(values) - 1
    while low <= high:
        middle = (low + high) // 2
        at = next((number for number in range(middle, high + 1) if held_bytes(values[number]) is not None), None)
        size = None if at is None else held_bytes(values[at])
        if at is None or size is None:
            high = middle - 1
        elif size <= cluster.device.memory_bytes:
            best, low = values[at], at + 1
        else:
            larger, high = values[at], middle - 1
    size = held_bytes(larger) if larger is not None else None
    return Most(best, larger, size or 0.0)


def _values(plan: Plan, key: str) -> Iterator[int]:
    """The values that are tried."""
    if key == "train.microbatch_size":
        yield from divisors(plan.work.microbatch_size * plan.work.num_microbatches)
    else:
        step = POSITIONS if key == "data.seq_len" else LAYERS
        yield from (step * number for number in range(1, MOST_STEPS + 1))


def _changes(config: Config, key: str, value: int) -> dict[str, Any]:
    """A longer sequence needs a model that takes it."""
    if key == "data.seq_len":
        return {key: value, "model.seq_len": max(value, config.model.seq_len or value)}
    return {key: value}


def _bytes_with(
    config: Config, plan: Plan, values: dict[str, Any], cluster: Cluster, software: Software
) -> float | None:
    try:
        other = build(changed(config, Change(values)), plan.model.vocab_size or None, plan.world_size)
    except (UserError, ValueError):  # a value that the config's types refuse, or the build
        return None
    return max(stage.total for stage in memory_of(other, cluster, software))
