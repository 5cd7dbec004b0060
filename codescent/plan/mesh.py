"""In: a degree for each axis. Out: the device mesh, the ranks of every group, the coordinates of every rank.
Does not create process groups and knows no strategy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from codescent.plan.brief import brief

AXES: tuple[str, ...] = ("pp", "dp_replicate", "dp_shard", "ep", "cp", "tp")
"""Mesh axes, outermost first: neighbours on the last axis are neighbouring ranks, so tp stays inside a node."""
MOST_RANKS = 1_000_000
"""More than anybody has. A file that names more ranks is damaged."""


def product_of(degrees: Mapping[str, int]) -> str:
    """Degrees by axis as text: "pp 1 x dp_replicate 4 x ...". ep is left out at 1: most models have no experts."""
    return " x ".join(f"{axis} {degree}" for axis, degree in degrees.items() if (axis, degree) != ("ep", 1))


@dataclass(frozen=True)
class Mesh:
    """An array of ranks with one dimension per axis of AXES, in row-major order.

    The argument `axis` of the methods is an axis name, or one of these forms:
    "dp_replicate*cp" joins two axes: a group has the ranks that differ on these two axes only.
    "pp[0,3]" selects indices on an axis: here the first and the fourth stage.
    "" is a group of one rank.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    ep: int = brief(1)
    cp: int = 1
    tp: int = 1

    def degree(self, axis: str) -> int:
        """Number of ranks along `axis`."""
        if axis in AXES:
            one: int = getattr(self, axis)
            return one
        return math.prod(len(indices) for indices in self._indices(axis).values())

    def joint(self, *axes: str) -> str:
        """Join the axes that have more than one rank into one name. Without such an axis: the first axis."""
        used = [axis for axis in axes if self.degree(axis) > 1]
        return "*".join(used) if used else axes[0]

    @property
    def world_size(self) -> int:
        """Number of ranks of the mesh."""
        return math.prod(self.degree(axis) for axis in AXES)

    def __contains__(self, rank: object) -> bool:
        """Whether a rank is one of the mesh. Ranks that compute nothing come behind it."""
        return isinstance(rank, int) and 0 <= rank < self.world_size

    @property
    def dp(self) -> int:
        """Number of parts of the global batch: the product of the degrees whose ranks read other samples."""
        return self.dp_replicate * self.dp_shard * self.ep

    def coordinates(self, rank: int) -> dict[str, int]:
        """Index of `rank` on each axis."""
        return dict(_coordinates(self, rank))

    def rank_at(self, coordinates: Mapping[str, int]) -> int:
        """The rank with these coordinates: the inverse of `coordinates`."""
        rank = 0
        for axis in AXES:
            rank = rank * self.degree(axis) + coordinates[axis]
        return rank

    def dp_index(self, rank: int) -> int:
        """Index of the part of the global batch that `rank` computes, 0 <= index < dp."""
        place = self.coordinates(rank)
        return (place["dp_replicate"] * self.dp_shard + place["dp_shard"]) * self.ep + place["ep"]

    def group(self, axis: str, rank: int) -> tuple[int, ...]:
        """Ranks that have the coordinates of `rank` on all other axes, in the order of `axis`."""
        chosen, place, strides = self._indices(axis), self.coordinates(rank), _strides(self)
        ranks = [sum(place[name] * strides[name] for name in AXES if name not in chosen)]
        for name, indices in chosen.items():
            ranks = [first + index * strides[name] for first in ranks for index in indices]
        return tuple(ranks)

    def groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """All groups of `axis`. A rank is in at most one group."""
        return tuple(dict.fromkeys(self.group(axis, rank) for rank in range(self.world_size)))

    def _indices(self, axis: str) -> dict[str, Sequence[int]]:
        """Split an axis name into its single axes, with the selected indices of each."""
        found: dict[str, Sequence[int]] = {}
        for part in filter(None, axis.split("*")):
            name, _, some = part.partition("[")
            found[name] = list(map(int, some.rstrip("]").split(","))) if some else range(getattr(self, name))
        return found


@lru_cache(maxsize=4096)  # the tensors of a plan, and plans of a search, ask for the same ranks
def _coordinates(mesh: Mesh, rank: int) -> dict[str, int]:
    place: dict[str, int] = {}
    for axis in reversed(AXES):
        rank, place[axis] = divmod(rank, mesh.degree(axis))
    return place


@lru_cache(maxsize=4096)
def _strides(mesh: Mesh) -> dict[str, int]:
    """How far two ranks are apart that are neighbours on an axis."""
    return {axis: math.prod(mesh.degree(inner) for inner in AXES[place + 1 :]) for place, axis in enumerate(AXES)}
