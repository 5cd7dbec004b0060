"""In: what a model or a file of answers has scored. Out: the same facts as lines for people and as data for programs.
Does not compute a score: each task does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Scores:
    """The scores of `codescent evaluate`.

    Attributes:
        lines: to print.
        facts: the same, by names that stay (docs/evaluate.md); shares are between 0 and 1, losses in nats.
    """

    lines: Sequence[str]
    facts: Mapping[str, Any]
