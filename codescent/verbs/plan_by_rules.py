"""In: the answer of the rules of docs/which.md. Out: its rows on the screen.
Does not choose a layout (planner/by_rules.py does) and does not print."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from codescent.base.amounts import of_bytes, of_share
from codescent.base.refusal import Value
from codescent.config.words import toml_value
from codescent.planner.by_rules import ByRules

NOT_SIMULATED = "by the rules of docs/which.md: nothing was simulated; --cluster NAME|FILE compares all layouts"
NO_KEY = "nothing: no key of a layout"


def rows(found: ByRules) -> Iterator[tuple[str, list[str]]]:
    """A name and lines for each row: how it was found, the layout, why, the memory, another trajectory."""
    held, size = found.held, found.devices.memory_bytes
    yield "layout", [NOT_SIMULATED]
    yield "  you have", [str(found.row)]
    yield "  take", list(_keys(found.change.values)) or [NO_KEY]
    yield "  why", list(found.why)
    yield "memory", [f"{of_bytes(held.total)} of {of_bytes(size)}, {of_share(held.total / size)}"]
    if found.other is not None:
        yield (
            "another trajectory",
            [
                f"{found.other.row}: {', '.join(_keys(found.other.keys))}",
                *found.other.why,
                "The losses are others then: compare them with your own model",
                f"all its keys: {', '.join(_keys(found.other.change.values))}",
            ],
        )


def _keys(values: Mapping[str, Value]) -> Iterator[str]:
    yield from (f"{key} = {toml_value(value)}" for key, value in values.items())
