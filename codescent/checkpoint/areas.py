"""In: rectangular parts of a tensor. Out: what two of them share, which ones cover another one, smaller pieces.
Does not know values, names or ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple


class Area(NamedTuple):
    """A part of a tensor: `sizes` elements from `offsets` on, one number per dim."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of its elements."""
        return math.prod(self.sizes)


def whole(shape: tuple[int, ...]) -> Area:
    """All of a tensor."""
    return Area((0,) * len(shape), tuple(shape))


def shared(one: Area, other: Area) -> Area | None:
    """The elements that are in both. None: there are none."""
    firsts = tuple(map(max, one.offsets, other.offsets))
    stops = [min(a + b, c + d) for a, b, c, d in zip(*one, *other, strict=True)]
    sizes = tuple(stop - first for first, stop in zip(firsts, stops))
    return Area(firsts, sizes) if all(size > 0 for size in sizes) else None


def without(area: Area, hole: Area) -> list[Area]:
    """What is left of an area when a part of it, `hole`, is taken out: at most two areas for each dim."""
    offsets, sizes, found = area.offsets, area.sizes, list[Area]()
    for dim, (first, size) in enumerate(zip(*hole, strict=True)):
        stop, end = first + size, offsets[dim] + sizes[dim]
        for begin, length in ((offsets[dim], first - offsets[dim]), (stop, end - stop)):
            if length:
                found.append(Area(_with(offsets, dim, begin), _with(sizes, dim, length)))
        offsets, sizes = _with(offsets, dim, first), _with(sizes, dim, size)
    return found


@lru_cache(maxsize=4096)  # many tensors of a model are divided alike
def cover(wanted: Area, areas: tuple[Area, ...]) -> tuple[tuple[int, Area], ...] | None:
    """Which area gives which part of `wanted`, as (index, part). Each element comes once, from the first area with it.

    Returns None if an element is in no area.
    """
    missing, found = [wanted] if wanted.numel else [], list[tuple[int, Area]]()
    for index, area in enumerate(areas):
        left = list[Area]()
        for part in missing:
            both = shared(part, area)
            if both is None:
                left.append(part)
            else:
                found.append((index, both))
                left += without(part, both)
        missing = left
    return None if missing else tuple(found)


def pieces(area: Area, most: int) -> Iterator[Area]:
    """Cut an area into pieces of at most so many elements, in the order of memory: by rows, and long rows once more."""
    if area.numel <= most:
        yield area
        return
    dim = next(dim for dim, size in enumerate(area.sizes) if size > 1)
    size = area.sizes[dim]
    step = max(1, most * size // area.numel)
    for first in range(0, size, step):
        offsets = _with(area.offsets, dim, area.offsets[dim] + first)
        yield from pieces(Area(offsets, _with(area.sizes, dim, min(step, size - first))), most)


def _with(numbers: tuple[int, ...], dim: int, number: int) -> tuple[int, ...]:
    return (*numbers[:dim], number, *numbers[dim + 1 :])
