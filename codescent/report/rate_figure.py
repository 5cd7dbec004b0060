"""In: learning rates of some steps, by config. Out: a figure of matplotlib: the rate of each step, a line for a config.
Does not read configs (verbs/plot_schedule.py does) and does not write files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure

from codescent.report.curves import DASHES, LINE, counts_axis, limits
from codescent.report.frame import framed, legend_above
from codescent.report.style import NO_UNIT, PALETTE, literal, plain

WIDTH_IN, PANEL_IN = 10.0, 4.6
MOST_NAMED = 4
"""Configs that the line below the title names; the legend names all."""


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


def draw_rates(curves: Sequence[RateCurve], width_in: float = WIDTH_IN) -> Figure:
    """Draw at least one curve. The axis is logarithmic if the peaks differ by a factor of ten."""
    figure = Figure(figsize=(width_in, PANEL_IN), dpi=110, layout="constrained")
    axes = figure.subplots()
    for number, curve in enumerate(curves):
        axes.plot(
            curve.steps, curve.rates, label=literal(_said(curve)), color=PALETTE[number % len(PALETTE)],
            ls=DASHES[number // len(PALETTE) % len(DASHES)], lw=LINE, marker="o" if len(curve.steps) < 3 else "",
        )  # fmt: skip
    longest, peaks = max(curve.num_steps for curve in curves), np.array([max(curve.rates) for curve in curves])
    axes.set_xlim(0, 1.01 * longest)
    limits(axes, [np.concatenate([peaks / 3, peaks])], from_zero=True)
    if axes.get_yscale() == "log":
        axes.set_ylim(bottom=peaks.min() / 100)
    axes.set_ylabel(f"learning rate {NO_UNIT}", fontsize=9)
    axes.set_xlabel("step", fontsize=9)
    counts_axis(axes, longest)
    plain(axes)
    legend_above(figure, *axes.get_legend_handles_labels())
    names = " / ".join(dict.fromkeys(curve.name for curve in curves[:MOST_NAMED]))
    more = f" / and {len(curves) - MOST_NAMED} more" if len(curves) > MOST_NAMED else ""
    return framed(figure, "Learning rate of each step", f"computed from the config, without a run: {names}{more}")


def _said(curve: RateCurve) -> str:
    """The name of a config, and its rates: the first, the highest, the last."""
    highest = max(curve.rates)
    until = max(step for step, rate in zip(curve.steps, curve.rates, strict=True) if rate == highest)
    return (
        f"{curve.name}: {curve.schedule}, {curve.rates[0]:.3g} at step 1, {highest:.3g} until step {until:,}, "
        f"{curve.rates[-1]:.3g} at step {curve.num_steps:,}"
    )
