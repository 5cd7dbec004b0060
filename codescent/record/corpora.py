"""In: the plan of a run. Out: the columns that its metrics have for each corpus of a mixture.
Does not compute their values (train/corpora.py does)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SHARE, VAL_LOSS = "share.", "val_loss."
"""The begin of the names of columns: the share of the samples of a step; the validation loss of the corpus."""


def names_of(plan: Mapping[str, Any]) -> tuple[str, ...]:
    """The corpora of the mixture in a plan, as JSON data; empty: the run has one corpus, or the plan is older."""
    found: Any = plan
    for name in ("task", "identity", "mixture"):
        found = found.get(name) if isinstance(found, Mapping) else None
    return tuple(found.split(", ")) if isinstance(found, str) else ()


def columns_of(plan: Mapping[str, Any]) -> tuple[str, ...]:
    """The columns of the corpora, in order."""
    return tuple(f"{begin}{name}" for name in names_of(plan) for begin in (SHARE, VAL_LOSS))
