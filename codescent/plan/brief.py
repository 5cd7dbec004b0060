"""In: the default of a dataclass field. Out: the field; plan.json leaves it out while it has this default.
Does not encode anything (plan.py does): plans that do not use a newer field keep their JSON."""

from __future__ import annotations

import dataclasses
from typing import Any

BRIEF = "brief"


def brief(default: Any) -> Any:
    """A field that plan.json leaves out if its value is the default."""
    if isinstance(default, dict):
        return dataclasses.field(default_factory=default.copy, metadata={BRIEF: True})
    return dataclasses.field(default=default, metadata={BRIEF: True})


def is_left_out(field: dataclasses.Field[Any], value: Any) -> bool:
    """Whether plan.json leaves out this value of a field."""
    if BRIEF not in field.metadata:
        return False
    makes = field.default_factory
    return bool(value == (field.default if makes is dataclasses.MISSING else makes()))
