"""In: factors with their values, a judge of whole rows, a judge of pairs. Out: rows in which every wanted pair meets.
Does not know what the factors mean. Pairs that no allowed row has are returned too."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product

Row = dict[str, str]
Value = tuple[str, str]
"""A factor and a value of it."""
Pair = tuple[Value, Value]
TRIES = 12
"""Rows that are built for each new row; the one with the most new pairs is taken."""


@dataclass(frozen=True)
class Covering:
    """`rows` have every wanted pair of values but those in `never`, which no allowed row has."""

    rows: list[Row]
    never: set[Pair]


def pairs_of(row: Mapping[str, str]) -> set[Pair]:
    """All pairs of values of a row, with the factors in the order of the row."""
    return set(combinations(row.items(), 2))


def cover(
    factors: Mapping[str, Sequence[str]], allowed: Callable[[Row], bool], wanted: Callable[[Value, Value], bool]
) -> Covering:
    """A pairwise covering array, built greedily (Cohen et al. 1997, "The AETG System", section 4), always the same.

    Args:
        factors: by name, the values.
        allowed: whether a row may be in the array; asked of whole rows only, of each row once.
        wanted: whether two values, in the order of their factors, have to meet.
    """
    draw, known = random.Random(0), dict[tuple[str, ...], bool]()
    values = {factor: [(factor, value) for value in factors[factor]] for factor in factors}
    left = {pair for f, g in combinations(factors, 2) for pair in product(values[f], values[g]) if wanted(*pair)}
    rows, never = list[Row](), set[Pair]()

    def judge(row: Row) -> bool:
        key = tuple(row.values())
        if key not in known:
            known[key] = allowed(row)
        return known[key]

    while left:
        next_pair = min(left)
        built = [_fill(factors, dict(next_pair), left, draw) for _ in range(TRIES)]
        built.sort(key=lambda row: -len(pairs_of(row) & left))
        row = next((row for row in built if judge(row)), None) or _any(factors, dict(next_pair), judge)
        if row is None:
            never.add(next_pair)
            left.remove(next_pair)
        else:
            rows.append(row)
            left -= pairs_of(row)
    return Covering(rows, never)


def _fill(factors: Mapping[str, Sequence[str]], given: Row, left: set[Pair], draw: random.Random) -> Row:
    """The row with the given values; each other factor, in random order, takes the value with most pairs left."""
    row = dict(given)
    for name in draw.sample(list(factors), len(factors)):
        if name not in row:
            values = draw.sample(list(factors[name]), len(factors[name]))
            row[name] = max(values, key=lambda value: len(pairs_of(_ordered(factors, {**row, name: value})) & left))
    return _ordered(factors, row)


def _any(factors: Mapping[str, Sequence[str]], given: Row, judge: Callable[[Row], bool]) -> Row | None:
    """The first allowed row with the given values, or None."""
    free = [name for name in factors if name not in given]
    for values in product(*(factors[name] for name in free)):
        row = _ordered(factors, {**given, **dict(zip(free, values))})
        if judge(row):
            return row
    return None


def _ordered(factors: Mapping[str, Sequence[str]], row: Row) -> Row:
    return {name: row[name] for name in factors if name in row}
