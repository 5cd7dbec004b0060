"""In: a sequence length, or a size of a mesh axis, that a strategy cannot use. Out: the nearest usable sizes, as text.
Does not decide what is usable: strategies do. The text is a part of an error message."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from codescent.strategies.strategy import Candidate

LARGEST_DEGREE = 1 << 14  # larger degrees are not tried: models have fewer heads, layers and slices of a sequence


def length_factor(candidate: Candidate) -> int:
    """Every length that cp and tp can divide is a multiple of this number of positions.

    cp cuts a sequence into two slices for each rank; a sample of several sequences it cannot cut. With sequence
    parallelism tp divides what a cp rank has.
    """
    cp = 1 if candidate.work.streams else candidate.mesh.cp
    tp = candidate.mesh.tp if candidate.layout.sequence_parallel else 1
    return cp * math.lcm(2 if cp > 1 else 1, tp)


def near_lengths(value: int, factor: int) -> str:
    """The nearest multiples of `factor`, as text, in positions. More positions also need a larger model.seq_len."""
    below, above = value // factor * factor, -(-value // factor) * factor
    longer = f"{above} positions (model.seq_len at least that)"
    return f"{below} positions (data.seq_len), or {longer}" if below else longer


def near_degrees(candidate: Candidate, axis: str, most: int, fits: Callable[[Candidate], bool]) -> str:
    """The nearest degrees of an axis for which `fits` is true, as text: one below and one above the candidate's.

    No degree is above `most`. Degrees that are possible on the run's ranks come first, with their dp_replicate. Other
    degrees come with the number of ranks that they need. Degree 1 comes last: it does without the strategy. The text
    is empty if no degree does.
    """
    degree = candidate.mesh.degree(axis)

    def nearest(degrees: range) -> str:
        tried = (
            on_ranks(candidate, axis, number, fits)
            for parts in ([number for number in degrees if number > 1], [number for number in degrees if number == 1])
            for on_ranks in (_on_these_ranks, _on_other_ranks)
            for number in parts
        )
        return next(filter(None, tried), "")

    below, above = range(min(degree - 1, LARGEST_DEGREE), 0, -1), range(degree + 1, most + 1)
    return ", or ".join(filter(None, (nearest(below), nearest(above))))


def _on_these_ranks(candidate: Candidate, axis: str, degree: int, fits: Callable[[Candidate], bool]) -> str:
    one = replace(candidate.mesh, **{axis: degree, "dp_replicate": 1})
    replicas, rest = divmod(candidate.world_size, one.world_size)
    other = candidate.on(replace(one, dp_replicate=replicas)) if replicas and not rest else None
    return f"{axis} = {degree} with dp_replicate = {replicas}" if other is not None and fits(other) else ""


def _on_other_ranks(candidate: Candidate, axis: str, degree: int, fits: Callable[[Candidate], bool]) -> str:
    mesh = replace(candidate.mesh, **{axis: degree})
    return f"{axis} = {degree} on {mesh.world_size} rank(s)" if fits(replace(candidate, mesh=mesh)) else ""
