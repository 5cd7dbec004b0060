"""In: the plan of a run. Out: the columns that its metrics have for what its objective measures beside the loss.
Does not compute their values (operators/preferences.py does)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from codescent.plan.objective import OF_ANSWERS, OF_PAIRS


def measures_of(plan: Mapping[str, Any]) -> tuple[str, ...]:
    """The columns of the measures in a plan, as JSON data, in order; empty: it has none, or the plan is older."""
    found: Any = plan
    for name in ("objective", "preference"):
        found = found.get(name) if isinstance(found, Mapping) else None
    if not isinstance(found, Mapping):
        return ()
    return OF_ANSWERS if found.get("answers") else OF_PAIRS
