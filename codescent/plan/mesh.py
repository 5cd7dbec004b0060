"""In: a degree for each axis. Out: the device mesh, the ranks of every group on it, a rank's place in it.
Does not create process groups and knows no strategy; a mesh is an array, a group is a slice of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

AXES: tuple[str, ...] = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Mesh axes, outermost first: neighbours on the last axis are neighbouring ranks, so tp stays inside a node."""


@dataclass(frozen=True)
class Mesh:
    """An array of ranks with one dimension per axis of AXES, rank 0 first, row-major."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1

    def degree(self, axis: str) -> int:
        """Number of ranks along `axis`."""
        return int(getattr(self, axis))

    @property
    def world_size(self) -> int:
        """Number of ranks in all."""
        return math.prod(self.degree(axis) for axis in AXES)

    @property
    def dp(self) -> int:
        """Number of parts that the global batch is divided into: both data-parallel axes."""
        return self.dp_replicate * self.dp_shard

    def coordinates(self, rank: int) -> dict[str, int]:
        """Place of `rank` on each axis."""
        place: dict[str, int] = {}
        for axis in reversed(AXES):
            rank, place[axis] = divmod(rank, self.degree(axis))
        return place

    def rank_at(self, coordinates: dict[str, int]) -> int:
        """Inverse of `coordinates`."""
        rank = 0
        for axis in AXES:
            rank = rank * self.degree(axis) + coordinates[axis]
        return rank

    def dp_index(self, rank: int) -> int:
        """Which part of the global batch `rank` works on, 0 <= index < dp."""
        place = self.coordinates(rank)
        return place["dp_replicate"] * self.dp_shard + place["dp_shard"]

    def group(self, axis: str, rank: int) -> tuple[int, ...]:
        """Ranks that differ from `rank` on `axis` alone, in their order on it."""
        place = self.coordinates(rank)
        return tuple(self.rank_at({**place, axis: index}) for index in range(self.degree(axis)))

    def groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """All the groups of `axis`; every rank is in exactly one."""
        return tuple(dict.fromkeys(self.group(axis, rank) for rank in range(self.world_size)))
