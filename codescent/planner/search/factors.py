"""In: the combinations of options that frames admit, as factors. Out: the same, divided by the values of some options.
Does not know what build refuses (rules.py does)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from codescent.base.refusal import Value
from codescent.planner.search.space import LayoutFrame, Options

Factors = tuple[tuple[Options, ...], ...]
"""Lists of options. A combination is one of each list."""
Family = Sequence[tuple[LayoutFrame, Factors]]
"""Frames with what they admit."""


class FactorsByValue:
    """Divides factors. Many frames have the same ones: they are divided once."""

    def __init__(self) -> None:
        self._split: dict[tuple[int, Sequence[str]], tuple[Factors, list[tuple[Options, Factors]]]] = {}
        self._all: dict[int, tuple[Factors, list[Options]]] = {}  # each keeps the factors whose id is the key

    def split(self, family: Family, keys: Sequence[str]) -> list[tuple[Options, Family]]:
        """For all values of some keys: the frames with the combinations that have them."""
        found: dict[tuple[Value, ...], tuple[Options, list[tuple[LayoutFrame, Factors]]]] = {}
        for frame, factors in family:
            for chosen, left in self._of(factors, keys):
                value = tuple([chosen[key] for key in keys])
                if value not in found:
                    found[value] = chosen, []
                found[value][1].append((frame, left))
        return list(found.values())

    def all(self, factors: Factors) -> list[Options]:
        """All combinations."""
        if id(factors) not in self._all:
            merged = [{key: value for one in some for key, value in one.items()} for some in product(*factors)]
            self._all[id(factors)] = factors, list(merged)
        return self._all[id(factors)][1]

    def _of(self, factors: Factors, keys: Sequence[str]) -> list[tuple[Options, Factors]]:
        same = id(factors), keys
        if same not in self._split:
            self._split[same] = factors, _split(factors, keys)
        return self._split[same][1]


def _split(factors: Factors, keys: Sequence[str]) -> list[tuple[Options, Factors]]:
    groups = []
    for factor in factors:
        by_value: dict[tuple[Value, ...], tuple[Options, list[Options]]] = {}
        for one in factor:
            chosen = {key: one[key] for key in keys if key in one}
            by_value.setdefault(tuple(chosen.values()), (chosen, []))[1].append(one)
        groups.append(list(by_value.values()))
    found: list[tuple[Options, Factors]] = []
    for parts in product(*groups):
        chosen = {key: value for options, _ in parts for key, value in options.items()}
        found.append((chosen, tuple(tuple(left) for _, left in parts)))
    return found
