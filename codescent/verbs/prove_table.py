"""In: the results of layouts. Out: the table of `codescent prove`, or the same facts as data for programs.
Does not run a layout (prove.py does) and does not compare (finding.py does)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from codescent.verbs.finding import COLUMNS, LayoutResult

ALONE = "one process"


def proved_json(findings: Sequence[LayoutResult], steps: int, precision: str, tolerance: float) -> dict[str, Any]:
    """What the table says, for programs. A difference is relative; null: it is not finite."""
    return {
        "steps": steps,
        "precision": precision,
        "tolerance": tolerance,
        "layouts": [
            {
                "layout": finding.layout,
                "ranks": finding.ranks,
                "verdict": finding.verdict(tolerance),
                "differences": finding.differences,
                "worst_step": finding.worst_step or None,
                "exact": finding.is_exact,
                "reason": finding.refused or finding.failed,
            }
            for finding in findings
        ],
    }


def show_progress(console: Console, number: str, finding: LayoutResult, tolerance: float) -> None:
    """Print the verdict on a layout at once where there is no terminal, which shows the layout under way."""
    if not console.is_terminal:
        console.print(f"{number}{finding.layout}: {finding.verdict(tolerance)}", markup=False, soft_wrap=True)
        console.file.flush()


def show(
    console: Console,
    findings: Sequence[LayoutResult],
    steps: int,
    precision: str,
    tolerance: float,
    *,
    what: str = "layout",
    reference: str = ALONE,
) -> None:
    """Print the table, and why runs have no losses. `what`: was tried. `reference`: with which each is compared."""
    table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(what, overflow="fold", ratio=1)
    for heading in ("ranks", "loss", "grad norm", "val loss", "at step"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for finding in findings:
        numbers = [f"{finding.differences[column]:.1e}" if column in finding.differences else "" for column in COLUMNS]
        step = str(finding.worst_step) if finding.worst_step else ""
        table.add_row(Text(finding.layout), str(finding.ranks), *numbers, step, finding.verdict(tolerance))
    console.print(f"{steps} steps in {precision}, largest relative differences from {reference}")
    console.print(f"same: at most {tolerance:g}")
    if any(not finding.is_exact for finding in findings):
        console.print(f"drift: another method than the steps of {ALONE}, so its losses are others")
    console.print(table)
    reasons: dict[str, list[str]] = {}
    for finding in findings:
        if reason := finding.refused or finding.failed:
            reasons.setdefault(reason, []).append(finding.layout)
    for reason, layouts in reasons.items():
        console.print(f"{'; '.join(layouts)}: {reason}", markup=False, soft_wrap=True)
