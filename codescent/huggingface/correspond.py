"""In: a table of which Hugging Face tensors hold which parameter. Out: for each dim, maps between
the indices of the parameter and the indices of the tensor.
Does not read or write tensors. In this folder "our" means codescent's and "their" means Hugging Face's."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from codescent.plan.shard import Parameter

Index = npt.NDArray[np.intp]  # indices in one dim, in any order


@dataclass(frozen=True)
class Theirs:
    """A Hugging Face tensor in a row of the table, or some of its rows. It has the axes of our parameter, in any order.

    Attributes:
        name, dims, some: see the comments.
        order: axes whose indices are in another order there: for each of theirs, ours.
        rows: the first one of its dim 0 that this is about, and the number of all; (0, 0): it is all of them.
    """

    name: str  # with "#" for the layer number
    dims: str  # its axes, one word per dim: "d (e h k)" is [d, e * h * k]; may omit an axis with a single index
    some: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # axes of which it has only [first, end)
    order: Mapping[str, Sequence[int]] = field(default_factory=dict)
    rows: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Row:
    """Our parameter (with "#" for the layer number), its axes (see Theirs.dims), and the tensors that hold it."""

    parameter: str
    dims: str
    theirs: tuple[Theirs, ...]


def same(ours: str, theirs: str, dims: str, their_dims: str = "") -> Row:
    """A row for a parameter that is exactly one of their tensors. `their_dims`: if the order of the axes differs."""
    return Row(ours, dims, (Theirs(theirs, their_dims or dims),))


def with_bias(ours: str, theirs: str, dims: str, their_dims: str = "") -> tuple[Row, Row]:
    """The rows of a weight and its bias. `dims` has the outputs first; `their_dims`, if given, has them last."""
    outputs, their_outputs = words(dims)[0], words(their_dims)[-1] if their_dims else ""
    weight = same(f"{ours}.weight", f"{theirs}.weight", dims, their_dims)
    return weight, same(f"{ours}.bias", f"{theirs}.bias", outputs, their_outputs)


@dataclass(frozen=True)
class TheirTensor:
    """One of their tensors, and the elements of our parameter that it holds.

    The tensor has the shape `whole`. Elements of this parameter are in the `shape[0]` rows from `first` on.

    All axes of their dim j belong to our dim `ours_of[j]`. If `ours_of` lacks one of our dims, this tensor has a single
    index of that dim.
    """

    tensor: str
    shape: tuple[int, ...]
    parameter: Parameter
    ours_of: tuple[int, ...]
    _ours: tuple[tuple[str, ...], ...]
    _theirs: tuple[tuple[str, ...], ...]
    _sizes: Mapping[str, int]  # of our axes
    _some: Mapping[str, tuple[int, int]]  # the range of each axis that this tensor holds: [first, end)
    _order: Mapping[str, Index]  # see Theirs.order
    first: int = 0
    rows: int = 0

    @property
    def whole(self) -> tuple[int, ...]:
        """The shape of the tensor, with the rows of other pieces."""
        return (self.rows or self.shape[0], *self.shape[1:])

    def to_ours(self, dim: int, indices: Index) -> Index:
        """Map indices of their dim to indices of our dim `ours_of[dim]`."""
        places = np.unravel_index(indices, self._some_sizes(self._theirs[dim]))
        at = {axis: self._place(axis, place) for axis, place in zip(self._theirs[dim], places)}
        return self._ravel(self._ours[self.ours_of[dim]], at, len(indices))

    def of_ours(self, dim: int) -> Index:
        """All indices of our dim that this tensor holds."""
        theirs = [number for number, ours in enumerate(self.ours_of) if ours == dim]
        if theirs:
            return self.to_ours(theirs[0], np.arange(self.shape[theirs[0]]))
        return self._ravel(self._ours[dim], {}, 1)

    def to_theirs(self, dim: int, indices: Index) -> tuple[Index, Index]:
        """Map indices of our dim to their tensor.

        Returns:
            Which of the `indices` this tensor holds, as positions in `indices`; and for each its index in the tensor's
            dim (zeros if the tensor lacks the dim).
        """
        axes = self._ours[dim]
        at = dict(zip(axes, np.unravel_index(indices, [self._sizes[axis] for axis in axes])))
        in_tensor = np.ones(len(indices), bool)
        for axis in axes:
            first, end = self._some[axis]
            in_tensor &= (at[axis] >= first) & (at[axis] < end)
        positions = np.flatnonzero(in_tensor)
        theirs = [number for number, ours in enumerate(self.ours_of) if ours == dim]
        if not theirs:
            return positions, np.zeros(len(positions), np.intp)
        their_axes = self._theirs[theirs[0]]
        places = [self._their_place(axis, at[axis][positions]) for axis in their_axes]
        return positions, np.ravel_multi_index(places, self._some_sizes(their_axes)) if their_axes else positions

    def _place(self, axis: str, theirs: Index) -> Index:
        """Our indices of an axis."""
        return self._order[axis][theirs] if axis in self._order else theirs + self._some[axis][0]

    def _their_place(self, axis: str, ours: Index) -> Index:
        return np.argsort(self._order[axis])[ours] if axis in self._order else ours - self._some[axis][0]

    def _some_sizes(self, axes: Iterable[str]) -> list[int]:
        return [self._some[axis][1] - self._some[axis][0] for axis in axes]

    def _ravel(self, axes: tuple[str, ...], at: Mapping[str, Index], count: int) -> Index:
        places = [at.get(axis, np.full(count, self._some[axis][0])) for axis in axes]
        return np.ravel_multi_index(places, [self._sizes[axis] for axis in axes])


def correspond(
    parameters: Iterable[Parameter], rows: Iterable[Row], sizes: Mapping[str, int]
) -> dict[str, tuple[TheirTensor, ...]]:
    """Their tensors for every parameter that the table `rows` contains, by the parameter's name.

    `sizes` are sizes of axes. In each dim one axis may be missing: its size follows from the parameter's shape.
    """
    table = {row.parameter: row for row in rows}
    found = {}
    for parameter in parameters:
        layer = re.search(r"\.(\d+)\.", parameter.name)
        row = table.get(re.sub(r"\.\d+\.", ".#.", parameter.name, count=1))
        if row is not None:
            number = layer[1] if layer else ""
            found[parameter.name] = tuple(_part(parameter, row, theirs, sizes, number) for theirs in row.theirs)
    return found


def _part(parameter: Parameter, row: Row, theirs: Theirs, known: Mapping[str, int], layer: str) -> TheirTensor:
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
    some = {axis: theirs.some.get(axis, (0, size)) for axis, size in sizes.items()}
    shape = tuple(math.prod(some[axis][1] - some[axis][0] for axis in dim) for dim in other)
    order = {axis: np.asarray(places, np.intp) for axis, places in theirs.order.items()}
    name = theirs.name.replace("#", layer)
    return TheirTensor(name, shape, parameter, ours_of, ours, other, sizes, some, order, *theirs.rows)


def words(dims: str) -> list[str]:
    """Split "d (e h k)" into ["d", "(e h k)"]."""
    return re.findall(r"\([^)]*\)|\S+", dims)


def _axes(dims: str) -> tuple[tuple[str, ...], ...]:
    """Split "d (e h k)" into (("d",), ("e", "h", "k"))."""
    return tuple(tuple(word.strip("()").split()) for word in words(dims))
