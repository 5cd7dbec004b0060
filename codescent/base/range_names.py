"""In: a step, a collective. Out: the names of their ranges in a trace; in: such a name. Out: what it stands for.
Does not record a range (ranges.py does) and does not import torch: what reads traces imports this file."""

from __future__ import annotations

WAITING = "waiting"
"""A block in which the rank waits for others. These blocks are `exposed_comm_s`."""
NEXT_BATCH = "next batch"
"""A block in which the rank takes the batch of a step from the loader."""
_STEP, _OVER = "step ", " over "


def step_name(number: int) -> str:
    """The range of a step, numbered from 1 as in metrics.csv."""
    return f"{_STEP}{number}"


def step_of(name: str) -> int | None:
    """The number of the step whose range has this name; None: it is no step's."""
    number = name.removeprefix(_STEP)
    return int(number) if number != name and number.isdecimal() else None


def collective_name(kind: str, axis: str) -> str:
    """The range of a collective: its kind and axis as in the Plan's traffic, such as "all_reduce over tp"."""
    return f"{kind}{_OVER}{axis}"


def collective_of(name: str) -> tuple[str, str] | None:
    """The kind and the axis of the collective whose range has this name; None: it is no collective's."""
    kind, over, axis = name.partition(_OVER)
    return (kind, axis) if over and kind.replace("_", "").isalpha() else None
