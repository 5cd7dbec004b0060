"""In: learning rates of some steps, by config. Out: a figure of matplotlib: the rate of each step, a line for a config.
Does not read configs (verbs/plot_schedule.py does) and does not write files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import wrap

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from codescent.report.curves import DASHES, LEFT_IN, LINE, LINE_IN, limits
from codescent.report.style import PALETTE, literal, plain

WIDTH_IN, PANEL_IN = 10.0, 4.2
LEGEND_CHARACTERS = 118
"""In a line of the legend."""


@dataclass(frozen=True)
class RateCurve:
    """The learning rates of a run.

    Attributes:
        name: of the config, with the overrides.
        schedule: `optimizer.schedule`.
        num_steps: of the run.
        steps: from 1, as in metrics.csv, ascending.
        rates: the learning rate of each of `steps`.
    """

    name: str
    schedule: str
    num_steps: int
    steps: Sequence[int]
    rates: Sequence[float]


def draw_rates(curves: Sequence[RateCurve]) -> Figure:
    """Draw at least one curve. The axis is logarithmic if the peaks differ by a factor of ten."""
    names = ["\n".join(wrap(_said(curve), LEGEND_CHARACTERS)) for curve in curves]
    top, bottom = 0.45 + LINE_IN * sum(1 + name.count("\n") for name in names), 0.6
    height = PANEL_IN + top + bottom
    figure = Figure(figsize=(WIDTH_IN, height), dpi=110)
    axes = figure.subplots()
    figure.subplots_adjust(LEFT_IN / WIDTH_IN, bottom / height, 1 - 0.25 / WIDTH_IN, 1 - top / height)
    for number, (curve, name) in enumerate(zip(curves, names, strict=True)):
        axes.plot(
            curve.steps, curve.rates, label=literal(name), color=PALETTE[number % len(PALETTE)],
            ls=DASHES[number // len(PALETTE) % len(DASHES)], lw=LINE, marker="o" if len(curve.steps) < 3 else "",
        )  # fmt: skip
    longest, peaks = max(curve.num_steps for curve in curves), np.array([max(curve.rates) for curve in curves])
    axes.set_xlim(0, 1.01 * longest)
    limits(axes, [np.concatenate([peaks / 3, peaks])], from_zero=True)
    if axes.get_yscale() == "log":
        axes.set_ylim(bottom=peaks.min() / 100)
    axes.set_title("learning rate", fontsize=10, fontweight="bold", loc="left")
    axes.set_xlabel("step", fontsize=9)
    if longest >= 10_000:
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    plain(axes)
    figure.legend(
        loc="upper left", bbox_to_anchor=(LEFT_IN / WIDTH_IN, 1), frameon=False, fontsize=9, borderaxespad=0.3,
        borderpad=0.0,
    )  # fmt: skip
    return figure


def _said(curve: RateCurve) -> str:
    """The name of a config, and its rates: the first, the highest, the last."""
    highest = max(curve.rates)
    until = max(step for step, rate in zip(curve.steps, curve.rates, strict=True) if rate == highest)
    return (
        f"{curve.name}: {curve.schedule}, {curve.rates[0]:.3g} at step 1, {highest:.3g} until step {until:,}, "
        f"{curve.rates[-1]:.3g} at step {curve.num_steps:,}"
    )
