"""In: the metrics of a layout and of one process. Out: their largest differences, and the verdict of `codescent prove`.
Does not run a layout (prove.py does)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from codescent.base.counted import counted

COLUMNS = ("train_loss", "grad_norm", "val_loss")
"""Columns of metrics.csv that are compared."""


@dataclass(frozen=True)
class LayoutResult:
    """The result for one layout.

    Attributes:
        layout: in words.
        ranks: their number.
        differences: largest relative difference of each column; empty if the layout did not run.
        worst_step: the step with the largest difference of the loss.
        refused: why the layout is not possible; else "".
        failed: why its run failed; else "".
        is_exact: False: the method is another one than a step of one process, so a difference is no error.
    """

    layout: str
    ranks: int
    differences: Mapping[str, float]
    worst_step: int = 0
    refused: str = ""
    failed: str = ""
    is_exact: bool = True

    def verdict(self, tolerance: float) -> str:
        """One of same, drift, DIFFERS, FAILED and refused."""
        if self.refused:
            return "refused"
        if self.failed:
            return "FAILED"
        if not self.is_exact and all(map(math.isfinite, self.differences.values())):
            return "drift"
        return "same" if all(value <= tolerance for value in self.differences.values()) else "DIFFERS"


def finding_of(
    layout: str,
    ranks: int,
    found: list[dict[str, float]] | str,
    expected: list[dict[str, float]],
    *,
    trains_apart: bool = False,
) -> LayoutResult:
    """Compare the rows of a layout, or why it failed, with those of one process.

    `trains_apart`: gradients are those of a replica, so their norms are not compared.
    """
    if isinstance(found, str):
        return LayoutResult(layout, ranks, {}, failed=found)
    if len(found) != len(expected):
        return LayoutResult(layout, ranks, {}, failed=f"{counted(len(found), 'step')} instead of {len(expected)}")
    columns = [column for column in COLUMNS if not (trains_apart and column == "grad_norm")]
    differences = {column: [_difference(a[column], b[column]) for a, b in zip(found, expected)] for column in columns}
    worst = max(range(len(expected)), key=lambda step: differences["train_loss"][step])
    largest = {column: max(values) for column, values in differences.items()}
    return LayoutResult(layout, ranks, largest, int(expected[worst].get("step", worst + 1)))


def _difference(found: float | None, expected: float | None) -> float:
    """The relative difference; 0 if both are missing; infinite if one is missing or not finite."""
    if found is None and expected is None:
        return 0.0
    if found is None or expected is None or not (math.isfinite(found) and math.isfinite(expected)):
        return math.inf
    return abs(found - expected) / abs(expected) if expected else abs(found)
