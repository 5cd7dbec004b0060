"""In: losses of steps, tokens/s. Out: PNG files: the training loss over tokens, and over wall-clock for each link.
Does not measure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

from matplotlib.figure import Figure

SMOOTH_POINTS = 3
"""Points whose mean is drawn: few tokens are noise."""


def smoothed(losses: Sequence[float], width: int = SMOOTH_POINTS) -> tuple[list[int], list[float]]:
    """Means of `width` consecutive losses, and how many losses end with each of them; the rest is left out."""
    ends = range(width, len(losses) + 1, width)
    return list(ends), [sum(losses[end - width : end]) / width for end in ends]


def draw(
    path: Path, hosts: int, tokens: int, curves: dict[str, tuple[int, list[float]]], rows: Sequence[dict[str, Any]]
) -> None:
    """Draw one figure.

    Args:
        path: of the PNG.
        hosts: number of hosts.
        tokens: of a step.
        curves: by method the steps of a point, and the mean training loss of each point.
        rows: of `slow_table.rows_of`, for these hosts, of all links.
    """
    rates = sorted({row["mbit"] for row in rows})
    figure = Figure(figsize=(4 * (1 + len(rates)) + 2, 4), layout="constrained")
    panels = figure.subplots(1, 1 + len(rates), sharey=True, squeeze=False)[0]
    for panel in panels:  # more curves than colours
        panel.set_prop_cycle(mpl.cycler(linestyle=["-", "--", ":"]) * mpl.rcParamsDefault["axes.prop_cycle"])
    for name, (every, losses) in curves.items():
        points, means = smoothed(losses)
        steps = [every * point for point in points]
        panels[0].plot([tokens * step / 1e3 for step in steps], means, label=name)
        for panel, mbit in zip(panels[1:], rates, strict=True):
            step_s = next((row["step_s"] for row in rows if row["method"] == name and row["mbit"] == mbit), None)
            if step_s is not None:
                panel.plot([step_s * step for step in steps], means, label=name)
    panels[0].set(xlabel="thousand tokens", ylabel="training loss", title=f"{hosts} hosts")
    for panel, mbit in zip(panels[1:], rates, strict=True):
        panel.set(xlabel="seconds", xscale="log", title=f"{hosts} hosts, {mbit:g} Mbit/s")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center", fontsize="small")
    for panel in panels:
        panel.grid(visible=True, alpha=0.3)
    figure.savefig(path, dpi=110)
