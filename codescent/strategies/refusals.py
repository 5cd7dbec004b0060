"""In: a number that does not divide, a degree that does not do. Out: the nearest that would, in words, for a refusal.
Does not refuse anything."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from codescent.strategies.strategy import Ask


def near_lengths(value: int, factor: int) -> str:
    """The same of positions of a sequence: for more of them the model has to have as many."""
    below, above = value // factor * factor, -(-value // factor) * factor
    longer = f"{above} positions (model.seq_len at least that)"
    return f"{below} positions (data.seq_len), or {longer}" if below else longer


def near_degrees(ask: Ask, axis: str, most: int, fits: Callable[[Ask], bool]) -> str:
    """The degrees of an axis next below and next above the one that is asked for that fit, up to `most`.

    Those that the run's ranks can have go before others; with each stands what else it takes: so many copies, or so
    many ranks.
    """
    degree = ask.mesh.degree(axis)

    def nearest(degrees: range) -> str:
        here = (_on_these_ranks(ask, axis, number, fits) for number in degrees if number > 1)
        elsewhere = (_on_other_ranks(ask, axis, number, fits) for number in degrees)
        return next(filter(None, itertools.chain(here, elsewhere)), "")

    return ", or ".join(filter(None, (nearest(range(degree - 1, 0, -1)), nearest(range(degree + 1, most + 1)))))


def _on_these_ranks(ask: Ask, axis: str, degree: int, fits: Callable[[Ask], bool]) -> str:
    one = replace(ask.mesh, **{axis: degree, "dp_replicate": 1})
    copies, rest = divmod(ask.world_size, one.world_size)
    other = ask.on(replace(one, dp_replicate=copies)) if copies and not rest else None
    return f"{axis} = {degree} with dp_replicate = {copies}" if other is not None and fits(other) else ""


def _on_other_ranks(ask: Ask, axis: str, degree: int, fits: Callable[[Ask], bool]) -> str:
    mesh = replace(ask.mesh, **{axis: degree})
    return f"{axis} = {degree} on {mesh.world_size} rank(s)" if fits(replace(ask, mesh=mesh)) else ""
