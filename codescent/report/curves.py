"""In: the metrics of runs. Out: a figure of matplotlib: loss, learning rate, gradient norm and speed of each run.
Does not read run folders (metrics.py does) and does not write files (verbs/plot.py does)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, MaxNLocator

from codescent.base.counted import counted
from codescent.report.frame import framed, legend_above
from codescent.report.metrics import X_AXES, Curves
from codescent.report.style import LOSS_UNIT, NO_UNIT, PALETTE, TEXT_GREY, literal, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

    Values = NDArray[np.float64]

SMOOTHED = 50  # a point of a smoothed curve is the mean of about this part of the rows: 1 / 50
POINTS, BINS = 200, 100  # points of a curve, and of the band of single rows: a million steps make no larger picture
MOST_PALE = 4  # runs; the single rows of more would hide each other
LOWEST_SHARE = 1000  # a logarithmic axis shows learning rates down to this share of a run's highest one
LOG_RATIO = 10.0  # values whose largest is so many times the smallest have a logarithmic axis
COINCIDING = 0.01  # runs whose losses differ by at most this part of their range are drawn on top of each other
DASHES = ("solid", (0, (5, 2)), (0, (1, 1.2)), (0, (5, 1, 1, 1)))
"""Line styles of the first runs, and of those that get the same colours again."""
LINE, BROAD, BROADEST = 1.5, 2.8, 5.6  # width of a line; added for each later run that coincides with it; in all
MOST_SAME = 3  # runs of which the caption names the one with the same losses
PANELS_IN = 6.2  # height of all panels
UNITS = (("s", 1.0), ("minutes", 60.0), ("hours", 3600.0), ("days", 86400.0))


@dataclass(frozen=True)
class Look:
    """How the curves of a run are drawn. `pale`: whether its single rows are shown behind their mean."""

    colour: str
    dashes: Any
    width: float
    pale: bool


def draw(runs: Sequence[Curves], x: str | None = None, config: str = "", width_in: float | None = None) -> Figure:
    """Draw the runs into one figure.

    Args:
        runs: at least one, each with at least one row.
        x: the horizontal axis, one of X_AXES; None: the loss over each of them, the other metrics over steps.
        config: what was run on what, in a line.
        width_in: of the figure, in inches; None: of its panels.
    """
    pairs = coinciding(runs)
    names, notes = [literal(run.name + run.state) for run in runs], _caption(runs, pairs)
    width_in = width_in or (13.0 if x is None else 10.0)
    figure = Figure(figsize=(width_in, PANELS_IN), dpi=110, layout="constrained")
    axes = figure.subplot_mosaic(
        [[*X_AXES], ["rate", "norm", "speed"]] if x is None else [[x] * 3, [0, 1, 2]],
        height_ratios=[1, 1] if x is None else [3, 2],
    )
    panels = list(axes.values())
    looks = looks_of(runs, pairs)
    apart = [replace(look, width=LINE) for look in looks]  # times differ, also of runs with the same losses
    for panel, over in zip(panels, X_AXES if x is None else [x]):
        draw_loss(panel, runs, apart if over == "time" else looks, over)
    over, same = x or "steps", apart if x == "time" else looks
    _metric(panels[-3], runs, same, over, "learning_rate", "learning rate", NO_UNIT)
    _metric(panels[-2], runs, same, over, "grad_norm", "gradient norm, before clipping", NO_UNIT)
    _metric(panels[-1], runs, apart, over, "tokens_per_s", "speed, all ranks", "tokens/s")
    lines = [Line2D([], [], color=look.colour, ls=look.dashes, lw=look.width) for look in looks]
    legend_above(figure, lines, names)
    title = runs[0].name if len(runs) == 1 else counted(len(runs), "run")
    return framed(figure, f"Training of {title}", config, notes)


def looks_of(runs: Sequence[Curves], pairs: Sequence[tuple[int, int, float, int]]) -> list[Look]:
    """The look of each run. Of `coinciding` runs the earlier is broad, and the later has no single rows behind it."""
    hidden = {later for _, later, _, rows in pairs if rows == len(runs[later].columns["step"])}
    later = [sum(i == earlier for earlier, *_ in pairs) for i in range(len(runs))]
    broad = min(BROAD, BROADEST / max(later, default=1)) if any(later) else BROAD
    return [
        Look(
            PALETTE[i % len(PALETTE)],
            DASHES[i // len(PALETTE) % len(DASHES)],
            LINE + broad * later[i],
            len(runs) <= MOST_PALE and i not in hidden,
        )
        for i in range(len(runs))
    ]


def coinciding(runs: Sequence[Curves]) -> list[tuple[int, int, float, int]]:
    """Pairs of runs with almost the same training losses: (index, later index, largest difference, common steps)."""
    found = []
    losses = [dict(zip(run.columns["step"], run.columns["train_loss"])) for run in runs]
    for (i, one), (j, two) in combinations(enumerate(losses), 2):
        steps = one.keys() & two.keys()
        values = np.array([(one[step], two[step]) for step in steps])
        values = values[np.isfinite(values).all(axis=1)] if len(values) else values
        if len(values) < 2:
            continue
        most = float(np.abs(values[:, 0] - values[:, 1]).max())
        if most <= COINCIDING * float(np.ptp(values)):
            found.append((i, j, most, len(values)))
    return found


def smooth(values: Values) -> tuple[Values, int]:
    """The centred moving average of values, without those that are NaN, and the number of rows in a mean.

    The window is narrower near the first row, where the loss falls steeply, and one-sided at the last row.
    """
    half = len(values) // (2 * SMOOTHED)
    index = np.arange(len(values))
    begin, end = np.maximum(index - half, 0), np.minimum(index + np.minimum(half, index) + 1, len(values))
    finite = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    number = counts[end] - counts[begin]
    means = np.where(number > 0, (sums[end] - sums[begin]) / np.maximum(number, 1), np.nan)
    return means, 2 * half + 1


def draw_loss(axes: Axes, runs: Sequence[Curves], looks: Sequence[Look], over: str) -> float:
    """Draw training and validation loss, and mark the steps that were skipped or after which a run was resumed.

    Returns the unit of the horizontal axis: a number of seconds if it is time, else 1.
    """
    scale = _axis(axes, runs, over, "loss", LOSS_UNIT)
    shown: list[Values] = []
    for run, look in zip(runs, looks):
        x, train, validation = x_of(run, over) / scale, _column(run, "train_loss"), _column(run, "val_loss")
        smoothed = curve(axes, x, train, look)
        scored = np.isfinite(validation)
        axes.plot(
            x[scored], validation[scored], marker="o" if scored.sum() <= 60 else "", color=look.colour,
            ls=(0, (2, 1.5)), lw=1.0, ms=5, mec="white", mew=0.8, zorder=4,
        )  # fmt: skip
        steps = _column(run, "step")
        marks = [(marker, at) for marker, at in (("x", run.skipped), ("^", run.resumed)) if at]
        for marker, at in marks:  # one without points would have its place in the corner of the figure
            where = np.interp(at, steps, x)
            axes.plot(
                where, np.full(len(at), 0.02), marker, color=look.colour, ms=5, zorder=5, clip_on=False,
                transform=axes.get_xaxis_transform(),
            )  # fmt: skip
        shown += [smoothed, validation]
    limits(axes, shown)
    return scale


def _metric(
    axes: Axes, runs: Sequence[Curves], looks: Sequence[Look], over: str, column: str, title: str, unit: str
) -> None:
    scale = _axis(axes, runs, over, title, unit)
    speed, shown = column == "tokens_per_s", []
    whole: list[Values] = []
    for run, look in zip(runs, looks):
        x, values = x_of(run, over) / scale, _column(run, column)
        if column == "learning_rate":
            at = thinned(values)
            axes.plot(x[at], values[at], color=look.colour, ls=look.dashes, lw=look.width, marker=_dot(values))
            peak = values[np.isfinite(values)].max(keepdims=True, initial=0.0)
            shown.append(np.concatenate([peak / 3, peak]))  # runs with other rates have a logarithmic axis, a decay not
            whole.append(values[np.isfinite(values) & (values > peak / LOWEST_SHARE)])
        else:
            shown.append(curve(axes, x, values, look))
    limits(axes, shown, from_zero=True, may_be_log=not speed)
    if whole and axes.get_yscale() == "log":  # a warm-up and a decay belong to what is compared
        axes.set_ylim(bottom=min(one.min(initial=axes.get_ylim()[0]) for one in whole) / 1.1)
    if speed:
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))


def curve(axes: Axes, x: Values, values: Values, look: Look) -> Values:
    """Draw the smoothed values as a line, and each value faintly behind it. Returns the smoothed values."""
    smoothed, rows = smooth(values)
    if look.pale and rows > 1 and len(values) > 2 * BINS:
        bins = np.array_split(np.arange(len(values)), BINS)
        some = [b for b in bins if np.isfinite(values[b]).any()]
        low, high = ([function(values[b]) for b in some] for function in (np.nanmin, np.nanmax))
        axes.fill_between([x[b].mean() for b in some], low, high, color=look.colour, alpha=0.16, lw=0)
    elif look.pale and rows > 1:
        axes.plot(x, values, color=look.colour, alpha=0.25, lw=0.8)
    at = thinned(smoothed)
    axes.plot(x[at], smoothed[at], color=look.colour, ls=look.dashes, lw=look.width, marker=_dot(values), ms=4)
    return smoothed


def _axis(axes: Axes, runs: Sequence[Curves], over: str, title: str, vertical: str) -> float:
    """Label the axes; `vertical`: the unit of the vertical one.

    Returns the unit of the horizontal axis: a number of seconds if it is time, else 1.
    """
    longest = max(np.nanmax(np.append(x_of(run, over), 0.0)) for run in runs) or 1.0
    unit, scale = next((one for one in reversed(UNITS) if longest >= 2 * one[1]), UNITS[0])
    axes.set_xlim(0, 1.01 * longest / (scale if over == "time" else 1.0))
    axes.set_title(title, fontsize=10, fontweight="bold", loc="left")
    axes.set_ylabel(vertical, fontsize=9)
    plain(axes)
    if over == "time":
        axes.set_xlabel(f"training time ({unit})", fontsize=9)
        return scale
    axes.set_xlabel({"steps": "step", "tokens": "tokens"}[over], fontsize=9)
    counts_axis(axes, longest)
    return 1.0


def counts_axis(axes: Axes, longest: float) -> None:
    """Steps or tokens to the right: whole numbers."""
    axes.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True))
    if longest >= 10_000:
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))


def limits(axes: Axes, shown: Sequence[Values], *, from_zero: bool = False, may_be_log: bool = True) -> None:
    """Show the smoothed values whole: a single row far away is cut off. The axis is logarithmic if they differ much."""
    values = np.concatenate(shown)
    values = values[np.isfinite(values)]
    if not len(values):
        axes.set_yticks([])
        axes.text(0.5, 0.5, "no finite value", transform=axes.transAxes, ha="center", fontsize=9, color=TEXT_GREY)
        return
    low, high = float(values.min()), float(values.max())
    if may_be_log and low > 0 and high > LOG_RATIO * low:
        axes.set_yscale("log")
        axes.set_ylim(low / 1.1, high * 1.1)
    else:
        low = 0.0 if from_zero and low >= 0 else low
        margin = 0.05 * (high - low or abs(high) or 1.0)
        axes.set_ylim(low - (0 if from_zero else margin), high + margin)


def _caption(runs: Sequence[Curves], pairs: Sequence[tuple[int, int, float, int]]) -> list[str]:
    rows = [smooth(_column(run, "step"))[1] for run in runs]
    mean = f"{min(rows)}" if min(rows) == max(rows) else f"{min(rows)} to {max(rows)}"
    parts = [f"lines: mean of {mean} rows of metrics" if max(rows) > 1 else "lines: each row"]
    parts += ["pale: single rows"] if max(rows) > 1 and len(runs) <= MOST_PALE else []
    parts += ["dots: validation loss"] if any(np.isfinite(_column(run, "val_loss")).any() for run in runs) else []
    parts += ["x: loss not finite, step skipped"] if any(run.skipped for run in runs) else []
    parts += ["triangles: resumed from a checkpoint"] if any(run.resumed for run in runs) else []
    return ["; ".join(parts), *_same_losses(runs, pairs)]


def _same_losses(runs: Sequence[Curves], pairs: Sequence[tuple[int, int, float, int]]) -> list[str]:
    """A line for each run whose losses an earlier one has; of many the first."""
    first = {later: (earlier, most, rows) for earlier, later, most, rows in reversed(pairs)}
    said = [
        f"{runs[later].name} has the losses of {runs[earlier].name} (broad line): in {rows:,} rows "
        f"{f'at most {most:.1e} apart' if most else 'equal'}"
        for later, (earlier, most, rows) in sorted(first.items())
    ]
    left = len(said) - MOST_SAME
    return [
        *said[:MOST_SAME],
        *([f"not named: {counted(left, 'run')} with the losses of an earlier one"] if left > 0 else []),
    ]


def x_of(run: Curves, over: str) -> Values:
    """The column of the horizontal axis."""
    return _column(run, X_AXES[over])


def _column(run: Curves, column: str) -> Values:
    return run.columns[column]


def thinned(values: Values, points: int = POINTS) -> NDArray[np.intp]:
    """Indices of at most `points` values, in order: the first, the last, and of each bin its smallest and largest."""
    if len(values) <= points:
        return np.arange(len(values))
    bins = np.array_split(np.arange(len(values)), points // 2 - 1)
    found = {0, len(values) - 1}
    for at in bins:
        known = at[np.isfinite(values[at])]
        found |= (
            {int(known[np.argmin(values[known])]), int(known[np.argmax(values[known])])} if len(known) else {int(at[0])}
        )
    return np.array(sorted(found))


def _dot(values: Values) -> str:
    """The marker of a curve of few rows, which a line alone would not show."""
    return "o" if np.isfinite(values).sum() < 3 else ""
