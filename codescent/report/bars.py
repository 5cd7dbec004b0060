"""In: names and numbers. Out: figures of horizontal bars, their rows and their axes.
Does not know runs or studies (run_figures.py, study_figures.py and predicted.py do)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from codescent.report.content import Picture
from codescent.report.frame import legend_above
from codescent.report.style import PARTS, PICTURE_IN, literal, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_BARS = 40
"""Bars of a figure; the caption names the number of those that are left out."""


def seconds_axis(longest: float) -> tuple[float, str]:
    """The scale and the label of an axis of seconds of a step."""
    return (1e3, "milliseconds of a step") if longest < 1 else (1.0, "seconds of a step")


def bytes_axis(longest: float) -> tuple[float, str]:
    """The scale and the label of an axis of bytes of a rank."""
    return (2.0**-30, "GiB of a rank") if longest >= 2**30 else (2.0**-20, "MiB of a rank")


def stacked(
    name: str,
    title: str,
    caption: str,
    rows: Mapping[str, Mapping[str, float]],
    parts: Mapping[str, tuple[str, str]] = PARTS,
    axis: Callable[[float], tuple[float, str]] = seconds_axis,
) -> Picture:
    """Bars of parts, one for each name; at most MOST_BARS. `parts`: their names and colours."""
    shown = dict(list(rows.items())[:MOST_BARS])

    def draw(width_in: float = PICTURE_IN[0]) -> Figure:
        from matplotlib.figure import Figure

        figure, axes = bars_figure(list(shown), Figure, width_in)
        scale, unit = axis(
            max((sum(row[part] for part in parts if part in row) for row in shown.values()), default=1.0)
        )
        left = np.zeros(len(shown))
        for part, (label, colour) in parts.items():
            widths = np.array([max(0.0, row.get(part, 0.0)) * scale for row in shown.values()])
            if widths.any():
                axes.barh(range(len(shown)), widths, left=left, color=colour, height=0.72, label=label)
                left += widths
        axes.set_xlabel(unit, fontsize=9)
        legend_above(figure, *axes.get_legend_handles_labels())
        return figure

    left_out = f" The first {MOST_BARS} of {len(rows)}." if len(rows) > MOST_BARS else ""
    return Picture(name, title, (caption + left_out).strip(), draw)


def bars_figure(
    names: Sequence[str], figure_type: type[Figure], width_in: float = PICTURE_IN[0]
) -> tuple[Figure, Axes]:
    """A figure with a row for each name, from the top."""
    figure = figure_type(figsize=(width_in, 0.7 + 0.24 * max(3, len(names))), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    plain(axes)
    axes.grid(visible=False, axis="y")
    axes.set_yticks(range(len(names)), [literal(shortened(name)) for name in names])
    axes.set_ylim(len(names) - 0.4, -0.6)
    return figure, axes


def shortened(name: str, most: int = 34) -> str:
    """The name with its middle left out, if it is long."""
    return name if len(name) <= most else f"{name[: most // 2 - 1]}…{name[-(most // 2 - 1) :]}"
