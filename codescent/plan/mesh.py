"""In: a degree for each axis. Out: the device mesh, the ranks of every group on it, a rank's place in it.
Does not create process groups and knows no strategy; a mesh is an array, a group is a slice of it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

AXES: tuple[str, ...] = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Mesh axes, outermost first: neighbours on the last axis are neighbouring ranks, so tp stays inside a node."""

DIVIDING: tuple[str, ...] = ("pp", "dp_shard", "tp")
"""The axes along which ranks hold different parts of the model, or of its gradients and optimizer state."""


@dataclass(frozen=True)
class Mesh:
    """An array of ranks with one dimension per axis of AXES, rank 0 first, row-major.

    The name of an axis may join several ("dp_replicate*cp": the ranks that differ on these two alone), or select ranks
    along one ("pp[0,3]": the first and the fourth). "" is a rank alone.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1

    def degree(self, axis: str) -> int:
        """Number of ranks along `axis`."""
        return math.prod(len(indices) for indices in self._indices(axis).values())

    def joint(self, *axes: str) -> str:
        """One name for several axes: those with more than one rank, or else the first."""
        used = [axis for axis in axes if self.degree(axis) > 1]
        return "*".join(used) if used else axes[0]

    @property
    def world_size(self) -> int:
        """Number of ranks in all."""
        return math.prod(self.degree(axis) for axis in AXES)

    @property
    def dp(self) -> int:
        """Number of parts that the global batch is divided into: both data-parallel axes."""
        return self.dp_replicate * self.dp_shard

    def coordinates(self, rank: int) -> dict[str, int]:
        """Index of `rank` on each axis."""
        place: dict[str, int] = {}
        for axis in reversed(AXES):
            rank, place[axis] = divmod(rank, self.degree(axis))
        return place

    def rank_at(self, coordinates: Mapping[str, int]) -> int:
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
        indices, place = self._indices(axis), self.coordinates(rank)
        return tuple(
            self.rank_at({**place, **dict(zip(indices, chosen, strict=True))})
            for chosen in itertools.product(*indices.values())
        )

    def groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """All the groups of `axis`; a rank is in one at the most."""
        return tuple(dict.fromkeys(self.group(axis, rank) for rank in range(self.world_size)))

    def _indices(self, axis: str) -> dict[str, Sequence[int]]:
        """The plain axes of a name, and the indices on each."""
        found: dict[str, Sequence[int]] = {}
        for part in filter(None, axis.split("*")):
            name, _, some = part.partition("[")
            found[name] = list(map(int, some.rstrip("]").split(","))) if some else range(getattr(self, name))
        return found
