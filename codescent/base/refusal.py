"""In: what is wrong with a config, and changes with which it would do. Out: `Refusal`: one sentence, and the changes.
Does not find changes (build and strategies do) and does not try them (build does)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from codescent.base.counted import plural

RANKS = "ranks"
Value = bool | int | float | str | None
"""Of a config key. None is written "auto"."""


@dataclass(frozen=True)
class Change:
    """A change of a run: other values by config key, another number of ranks, or both.

    `ranks` None: as many ranks as before.
    """

    values: Mapping[str, Value]
    ranks: int | None = None

    def words(self) -> list[str]:
        """The values as words of a command line."""
        shown = (("auto" if value is None else str(value)) for value in self.values.values())
        return [f"{key}={text.lower()}" for key, text in zip(self.values, shown, strict=True)]

    def and_also(self, values: Mapping[str, Value]) -> Change:
        """This change with more values."""
        return Change({**self.values, **values}, self.ranks)


class Refusal(str):
    """A problem of a config as a sentence, which ends with the nearest changes that would do.

    Attributes:
        said: the problem alone.
        changes: each is enough to solve it.
    """

    said: str
    changes: tuple[Change, ...]

    def __new__(cls, said: str, changes: Iterable[Change] = (), *, where: str = "") -> Refusal:
        """`where`: words after "nearest that would do", such as " on a resume"."""
        found: list[Change] = []
        for change in changes:
            if change not in found:
                found.append(change)
        text = f"{said}; nearest that would do{where}: {in_words(found)}" if found else said
        refusal = super().__new__(cls, text)
        refusal.said, refusal.changes = said, tuple(found)
        return refusal


def each(key: str, numbers: Iterable[int]) -> list[Change]:
    """A change of one key for each number."""
    return [Change({key: number}) for number in numbers]


def in_words(changes: Iterable[Change]) -> str:
    """The changes as text. Neighbours that differ in one number are said once: "parallel.tp = 2 or 4"."""
    groups: list[dict[str, list[str]]] = []
    for change in changes:
        slots = {key: json.dumps("auto" if value is None else value) for key, value in change.values.items()}
        if change.ranks is not None:
            slots[RANKS] = str(change.ranks)
        last = groups[-1] if groups else {}
        differs = [key for key, value in slots.items() if last.get(key) != [value]]
        if list(last) == list(slots) and len(differs) == 1:
            last[differs[0]].append(slots[differs[0]])
        else:
            groups.append({key: [value] for key, value in slots.items()})
    return ", or ".join(map(_group_in_words, groups))


def _group_in_words(group: Mapping[str, list[str]]) -> str:
    keys = " and ".join(f"{key} = {' or '.join(values)}" for key, values in group.items() if key != RANKS)
    if RANKS not in group:
        return keys
    ranks = f"{' or '.join(group[RANKS])} {plural(int(group[RANKS][-1]), 'rank')}"
    return f"{keys} on {ranks}" if keys else ranks
