"""In: values of a JSON file by name, and the types that they must have. Out: what is wrong with one, in words.
Does not read files and does not know what a value means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Kind = type[int] | type[float] | type[str] | type[list[Any]]

WORDS: Mapping[Any, str] = {int: "a whole number", float: "a number", str: "a text", list: "a list of objects"}
LARGEST = 2**63


def mistyped(values: Any, kinds: Mapping[str, Kind]) -> str:
    """Why `values` are not an object whose values have these types; "": they are. Missing values and null are right.

    A number must be finite, and a list must be one of objects. Names that are not in `kinds` may have any value.
    """
    if not isinstance(values, Mapping):
        return "not a JSON object"
    for name, kind in kinds.items():
        value = values.get(name)
        if value is not None and not _is(kind, value):
            return f"{name}: given {str(value)[:40]!r}; must be {WORDS[kind]}"
    return ""


def is_number(value: Any) -> bool:
    """Whether a value is a finite number that is not too large to compute with. A bool is none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST  # NaN is not below


def _is(kind: Kind, value: Any) -> bool:
    if kind in (int, float):
        return is_number(value) and isinstance(value, int if kind is int else int | float)
    if kind is list:
        return isinstance(value, list) and all(isinstance(item, Mapping) for item in value)
    return isinstance(value, kind)
