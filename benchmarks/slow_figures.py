"""In: losses of steps, tokens/s. Out: PNG files: the training loss over tokens, and over wall-clock for each link.
Does not measure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from cycler import cycler

mpl.use("Agg")

from matplotlib.figure import Figure

SMOOTH_POINTS = 3
"""Points whose mean is drawn: few tokens are noise."""
LEGEND_COLUMNS = 3


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
    columns = min(2, 1 + len(rates))
    down = -(-(1 + len(rates)) // columns)
    legend_rows = -(-len(curves) // LEGEND_COLUMNS)
    figure = Figure(figsize=(6 * columns, 4 * down + 0.22 * legend_rows), layout="constrained")
    grid = list(figure.subplots(down, columns, sharey=True, squeeze=False).flat)
    panels = grid[: 1 + len(rates)]
    for unused in grid[len(panels) :]:
        unused.set_axis_off()
    # More curves than colours.
    panels[0].set_prop_cycle(cycler(linestyle=["-", "--", ":"]) * mpl.rcParamsDefault["axes.prop_cycle"])
    for name, (every, losses) in curves.items():
        points, means = smoothed(losses)
        steps = [every * point for point in points]
        (line,) = panels[0].plot([tokens * step / 1e3 for step in steps], means, label=name)
        same = {"color": line.get_color(), "linestyle": line.get_linestyle()}
        for panel, mbit in zip(panels[1:], rates, strict=True):
            step_s = next((row["step_s"] for row in rows if row["method"] == name and row["mbit"] == mbit), None)
            if step_s is not None:
                panel.plot([step_s * step for step in steps], means, **same)
    panels[0].set(xlabel="thousand tokens", title=f"{hosts} hosts")
    for panel, mbit in zip(panels[1:], rates, strict=True):
        panel.set(xlabel="seconds", xscale="log", title=f"{hosts} hosts, {mbit:g} Mbit/s")
    for panel in panels:
        panel.set_ylabel("training loss")
        panel.grid(visible=True, alpha=0.3)
    handles = panels[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", fontsize="small", ncols=LEGEND_COLUMNS)
    figure.savefig(path, dpi=110)
