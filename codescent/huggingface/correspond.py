"""In: rows of a table: a parameter of ours, tensors of theirs, the axes of both in words. Out: which element is which.
Does not read a tensor: it computes with indices of dims, in both directions from the one description."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from codescent.plan.shard import Parameter

Index = npt.NDArray[np.intp]
"""Indices in one dim, in the order in which they are wanted."""


@dataclass(frozen=True)
class Theirs:
    """A tensor of theirs in a row of a table.

    Attributes:
        name: of the tensor; "#" stands for the layer.
        dims: its axes, a dim a word: "d (e h k)" is [d, e * h * k]. The axes are those of our parameter, in any order.
        some: of these axes it has this part alone, [first, end); one that has a single index may be left out of `dims`.
    """

    name: str
    dims: str
    some: Mapping[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """A parameter of ours, by its name with "#" for the layer, its axes (see Theirs.dims), and where they have it."""

    parameter: str
    dims: str
    theirs: tuple[Theirs, ...]


@dataclass(frozen=True)
class Part:
    """One tensor of theirs, of `shape`, and which elements of one parameter of ours are in it.

    Every dim of theirs is made of axes of one dim of ours: `ours_of[j]`. A dim of ours that none of theirs is made of
    has one index in this tensor.
    """

    tensor: str
    shape: tuple[int, ...]
    parameter: Parameter
    ours_of: tuple[int, ...]
    _ours: tuple[tuple[str, ...], ...]
    _theirs: tuple[tuple[str, ...], ...]
    _sizes: Mapping[str, int]
    _some: Mapping[str, tuple[int, int]]

    def to_ours(self, dim: int, indices: Index) -> Index:
        """Where the indices of a dim of theirs are in the dim `ours_of[dim]` of our parameter."""
        places = np.unravel_index(indices, self._some_sizes(self._theirs[dim]))
        at = {axis: place + self._first(axis) for axis, place in zip(self._theirs[dim], places)}
        return self._ravel(self._ours[self.ours_of[dim]], at, len(indices))

    def of_ours(self, dim: int) -> Index:
        """All the indices of a dim of ours that this tensor has."""
        theirs = [number for number, ours in enumerate(self.ours_of) if ours == dim]
        if theirs:
            return self.to_ours(theirs[0], np.arange(self.shape[theirs[0]]))
        return self._ravel(self._ours[dim], {}, 1)

    def to_theirs(self, dim: int, indices: Index) -> tuple[Index, Index]:
        """Of indices of a dim of ours: which of them (positions in `indices`) are in this tensor, and where there; of
        a dim that theirs have not, zeros."""
        axes = self._ours[dim]
        at = dict(zip(axes, np.unravel_index(indices, [self._sizes[axis] for axis in axes])))
        here = np.ones(len(indices), bool)
        for axis in axes:
            first, end = self._some.get(axis, (0, self._sizes[axis]))
            here &= (at[axis] >= first) & (at[axis] < end)
        positions = np.flatnonzero(here)
        theirs = [number for number, ours in enumerate(self.ours_of) if ours == dim]
        if not theirs:
            return positions, np.zeros(len(positions), np.intp)
        kept = self._theirs[theirs[0]]
        places = [at[axis][positions] - self._first(axis) for axis in kept]
        return positions, np.ravel_multi_index(places, self._some_sizes(kept)) if kept else positions

    def _first(self, axis: str) -> int:
        return self._some[axis][0] if axis in self._some else 0

    def _some_sizes(self, axes: Iterable[str]) -> list[int]:
        return [_size(axis, self._sizes, self._some) for axis in axes]

    def _ravel(self, axes: tuple[str, ...], at: Mapping[str, Index], count: int) -> Index:
        places = [at.get(axis, np.full(count, self._first(axis))) for axis in axes]
        return np.ravel_multi_index(places, [self._sizes[axis] for axis in axes])


def correspond(
    parameters: Iterable[Parameter], rows: Iterable[Row], sizes: Mapping[str, int]
) -> dict[str, tuple[Part, ...]]:
    """The parts of every parameter that the rows have, by its name.

    Args:
        parameters: of ours.
        rows: the table.
        sizes: of axes that do not follow from the parameter's shape: all but one in each of its dims.
    """
    table = {row.parameter: row for row in rows}
    found = {}
    for parameter in parameters:
        layer = re.search(r"\.(\d+)\.", parameter.name)
        row = table.get(re.sub(r"\.\d+\.", ".#.", parameter.name, count=1))
        if row is not None:
            parts = (_part(parameter, row, theirs, sizes, layer[1] if layer else "") for theirs in row.theirs)
            found[parameter.name] = tuple(parts)
    return found


def _part(parameter: Parameter, row: Row, theirs: Theirs, known: Mapping[str, int], layer: str) -> Part:
    ours, other = _axes(row.dims), _axes(theirs.dims)
    sizes = {axis: known[axis] for dim in ours for axis in dim if axis in known}
    for dim, size in zip(ours, parameter.shape, strict=True):
        unknown = [axis for axis in dim if axis not in sizes]
        product = math.prod(sizes[axis] for axis in dim if axis in sizes)
        sizes |= dict.fromkeys(unknown, size // product)
        assert len(unknown) <= 1, (row, unknown)
        assert math.prod(sizes[axis] for axis in dim) == size, (row, parameter.shape)
    dim_of = {axis: number for number, dim in enumerate(ours) for axis in dim}
    ours_of = tuple(dim_of[dim[0]] for dim in other)
    assert all(dim_of[axis] == number for dim, number in zip(other, ours_of) for axis in dim), row
    assert len(set(ours_of)) == len(ours_of), row
    shape = tuple(math.prod(_size(axis, sizes, theirs.some) for axis in dim) for dim in other)
    name = theirs.name.replace("#", layer)
    return Part(name, shape, parameter, ours_of, ours, other, sizes, theirs.some)


def _size(axis: str, sizes: Mapping[str, int], some: Mapping[str, tuple[int, int]]) -> int:
    first, end = some.get(axis, (0, sizes[axis]))
    return end - first


def _axes(dims: str) -> tuple[tuple[str, ...], ...]:
    """ "d (e h k)" as (("d",), ("e", "h", "k"))."""
    return tuple(tuple(word.strip("()").split()) for word in re.findall(r"\([^)]*\)|\S+", dims))
