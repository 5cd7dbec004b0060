"""In: an evaluated study. Out: its figures: time, speed-up, efficiency, FLOP/s, parts, overhead, memory.
Does not evaluate anything. A point without a number is a gap with a mark, and the caption says why."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from codescent.report.bars import MOST_BARS, bars_figure, seconds_axis, stacked
from codescent.report.content import Picture
from codescent.report.frame import legend_above
from codescent.report.style import BLACK, PALETTE, PICTURE_IN, TEXT_GREY, literal, plain
from codescent.results import Interval
from codescent.study.marks import MarkKind
from codescent.study.points import axes_named, values_of
from codescent.study.result import Fit, Group, Point, PointQuantity, PointState, PredictedPoint, Study

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKERS = "osD^vPX"
MOST_REASONS, MOST_NAMED = 6, 3
"""Reasons for crosses that a caption has, and points of each that it names."""
MOST_LINEAR = 16
"""A horizontal axis is logarithmic if the most workers are more than so many times the fewest."""
COMPUTE = "_compute"
"""How the names of figures about computation alone end."""
IN_ALL, ALONE = "in all", "forward and backward alone"
"""How the titles of the two kinds of figures end."""
STATE_SIZE = 6.5
"""Points of the text beside a cross."""


Predicted = Callable[[PredictedPoint], float | None]


@dataclass(frozen=True)
class Quantity:
    """What a figure has on its vertical axis.

    Attributes:
        name: of the figure's file.
        of: the interval of a point; None: not measured.
        scale: by which its numbers are multiplied for the axis.
        predicted: of a point, before its runs, in the units of `of`; None: nothing was.
        ideal: what a perfect machine would have for a number of workers and that of the baseline; None: no line.
    """

    name: str
    title: str
    axis: str
    of: Callable[[Point], Interval | None]
    predicted: Predicted
    scale: float = 1.0
    ideal: Callable[[float, float], float] | None = None


TIME = "time"
FIRST = (TIME, "speed_up")
"""Names of the figures with which the page of a study begins."""


def pictures(study: Study) -> Iterator[Picture]:
    """The figures of a study that have at least one number."""
    points = [point for group in study.groups for point in group.points]
    grows = any(point.workers is not None for point in points)
    for quantity in _quantities(study):
        if any(quantity.of(point) is not None for point in points):
            if grows:
                yield _over_workers(study, quantity)
            else:
                yield _over_points(study, quantity)
    if any(point.parts_s for point in points):
        yield _parts(points)
    if any(point.memory_bytes is not None for point in points):
        memory = Quantity(
            "memory", "Peak memory of a rank", "GiB, the fullest rank", _memory, lambda one: one.memory_bytes, 2**-30
        )
        yield _over_workers(study, memory) if grows else _over_points(study, memory)


def _quantities(study: Study) -> Iterator[Quantity]:
    def both(
        name: str, title: str, axis: str, of: Callable[[Point], PointQuantity], predicted: Predicted, alone: Predicted,
        **more: Any,
    ) -> Iterator[Quantity]:  # fmt: skip
        yield Quantity(name, f"{title}, {IN_ALL}", axis, lambda point: of(point).total, predicted, **more)
        title, axis = f"{title}, {ALONE}", f"{axis}\n({ALONE})"
        yield Quantity(name + COMPUTE, title, axis, lambda point: of(point).compute, alone, **more)

    by = f"\n(FLOPs: {study.formula.said})" if study.formula is not None else ""
    times = [found.value for group in study.groups for point in group.points if (found := point.step_s.total)]
    scale, unit = seconds_axis(max(times, default=1.0))
    yield from both(
        TIME,
        "Time of a step",
        unit,
        lambda point: point.step_s,
        lambda one: one.step_s,
        lambda one: one.compute_s,
        scale=scale,
    )
    speed_up = "speed-up (times the baseline)"
    yield from both(
        "speed_up",
        "Speed-up",
        speed_up,
        lambda point: point.speed_up,
        lambda one: one.speed_up,
        _nothing,
        ideal=lambda n, base: n / base,
    )
    share = "efficiency (%)"
    yield from both(
        "efficiency",
        "Efficiency",
        share,
        lambda point: point.efficiency,
        lambda one: one.efficiency,
        _nothing,
        scale=100.0,
        ideal=lambda n, base: 1.0,
    )
    yield from both(
        "flops",
        "Speed",
        f"GFLOP/s, all ranks{by}",
        lambda point: point.flops_per_s,
        lambda one: one.flops_per_s,
        _nothing,
        scale=1e-9,
    )
    peak = f"% of the measured peak{by}"
    yield Quantity("mfu", "Use of the devices (MFU)", peak, lambda point: point.mfu, _nothing, 100.0)
    yield Quantity("overhead", "Overhead: all but computation", "% of a step", _overhead, _overhead_predicted, 100.0)


def _nothing(one: PredictedPoint) -> None:
    """No prediction: it has another peak, or no such part."""
    return


def _overhead_predicted(one: PredictedPoint) -> float:
    return 1.0 - one.compute_s / one.step_s


def _overhead(point: Point) -> Interval | None:
    return None if point.overhead is None else Interval(point.overhead, np.nan, np.nan)


def _memory(point: Point) -> Interval | None:
    return None if point.memory_bytes is None else Interval(float(point.memory_bytes), np.nan, np.nan)


def _over_workers(study: Study, quantity: Quantity) -> Picture:
    """Lines over the number of workers, one for each group."""

    def draw(width_in: float = PICTURE_IN[0]) -> Figure:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(width_in, PICTURE_IN[1]), dpi=110, layout="constrained")
        axes = figure.add_subplot()
        plain(axes)
        workers = sorted({point.workers for group in study.groups for point in group.points if point.workers})
        _ideal(axes, study, quantity, workers)
        for number, group in enumerate(study.groups):
            _line(axes, group, quantity, number)
        _workers_axis(axes, workers, study.unit)
        axes.set_ylabel(quantity.axis, fontsize=9)
        if quantity.name.startswith("speed_up") and axes.get_xscale() == "log":
            axes.set_yscale("log", base=2)
            axes.yaxis.set_major_formatter("{x:g}")
        else:
            axes.set_ylim(bottom=0)
        if len(axes.get_legend_handles_labels()[0]) > 1 or study.groups[0].label:
            legend_above(figure, *axes.get_legend_handles_labels())
        return figure

    return Picture(quantity.name, quantity.title, _caption(study, quantity), draw)


def _ideal(axes: Axes, study: Study, quantity: Quantity, workers: Sequence[int]) -> None:
    """A dashed line of what perfect scaling would give, and dotted ones of the laws that were fitted."""
    if quantity.ideal is None:
        return
    base = min(_baselines(study), default=1)
    places = np.linspace(min(workers), max(workers), 50)
    ideal = [quantity.scale * quantity.ideal(float(one), float(base)) for one in places]
    axes.plot(places, ideal, color=TEXT_GREY, ls=(0, (4, 3)), lw=1.0, label="ideal")
    if quantity.name == "speed_up":
        for number, group in enumerate(study.groups):
            for fit in filter(_drawn, group.fits):
                axes.plot(
                    list(fit.curve), list(fit.curve.values()), color=PALETTE[number % len(PALETTE)], lw=0.8, ls=":"
                )


def _drawn(fit: Fit) -> bool:
    """Amdahl's law alone: more lines would hide the points."""
    return bool(fit.curve) and fit.law == "Amdahl"


def _baselines(study: Study) -> list[int]:
    """The workers of the points that speed-up refers to."""
    names = {group.baseline for group in study.groups}
    points = [point for group in study.groups for point in group.points if point.name in names]
    return [point.workers for point in points if point.workers is not None]


def _line(axes: Axes, group: Group, quantity: Quantity, number: int) -> None:
    """The points of a group, joined; a gap where one is missing."""
    colour = PALETTE[number % len(PALETTE)]
    points = [point for point in group.points if point.workers is not None]
    at = [float(point.workers or 0) for point in points]
    _predicted_line(axes, points, quantity, colour, label="predicted" if number == 0 else "")
    found = [quantity.of(point) for point in points]
    value = np.array([np.nan if one is None else one.value for one in found]) * quantity.scale
    low = np.array([np.nan if one is None else one.value - one.low for one in found]) * quantity.scale
    high = np.array([np.nan if one is None else one.high - one.value for one in found]) * quantity.scale
    bars = np.nan_to_num(np.clip([low, high], 0, None))
    label = literal(group.label) or "measured"
    axes.errorbar(
        at, value, yerr=bars, color=colour, lw=1.5, ls=("-", "--", "-.")[number // len(PALETTE) % 3], capsize=2.5,
        elinewidth=1.0, marker=MARKERS[number % len(MARKERS)], ms=4.5, label=label, zorder=3,
    )  # fmt: skip
    for x, y, point in zip(at, value, points, strict=True):
        if not np.isfinite(y):
            _cross(axes, x, number, colour, _state(point), to_left=x > at[0])
        elif _super_linear(point, quantity):
            axes.plot([x], [y], "*", color=colour, ms=13, mec=BLACK, mew=0.6, zorder=4)


def _cross(axes: Axes, x: float, number: int, colour: str, state: str, *, to_left: bool) -> None:
    """A missing point, with its state. Several groups that miss one have their crosses above each other."""
    height = 0.03 + 0.045 * (number % 8)
    across = axes.get_xaxis_transform()
    axes.plot([x], [height], "x", color=colour, ms=6, mew=1.6, clip_on=False, zorder=5, transform=across)
    axes.annotate(
        state, (x, height), (-6 if to_left else 6, 0), xycoords=across, textcoords="offset points", fontsize=STATE_SIZE,
        color=colour, ha="right" if to_left else "left", va="center", zorder=5,
    )  # fmt: skip


def _predicted_line(axes: Axes, points: Sequence[Point], quantity: Quantity, colour: str, label: str) -> None:
    """What was predicted of the points, as a pale line behind them; of the step with its band."""
    known = [
        (float(point.workers or 0), quantity.scale * value, point.predicted)
        for point in points
        if point.predicted is not None and (value := quantity.predicted(point.predicted)) is not None
    ]
    if not known:
        return
    at, values = [one[0] for one in known], [one[1] for one in known]
    axes.plot(at, values, color=colour, alpha=0.35, lw=4.0, marker="D", ms=6, mew=0, zorder=2, label=label or None)
    if quantity.name == TIME:
        low, high = ([quantity.scale * one.band_s[end] for _, _, one in known] for end in (0, 1))
        axes.fill_between(at, low, high, color=colour, alpha=0.1, lw=0, zorder=1)


def _super_linear(point: Point, quantity: Quantity) -> bool:
    """Whether a point is marked so, in a figure of speed-up or efficiency."""
    wanted = MarkKind.COMPUTATION if quantity.name.endswith(COMPUTE) else MarkKind.SUPER_LINEAR
    return quantity.ideal is not None and any(mark.kind is wanted for mark in point.marks)


def _workers_axis(axes: Axes, workers: Sequence[int], unit: str) -> None:
    """An axis with a tick for each number of workers that was tried; logarithmic if they are far apart."""
    from matplotlib.ticker import NullLocator

    if max(workers) > MOST_LINEAR * min(workers):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlim(min(workers) / 1.15, max(workers) * 1.15)
    axes.set_xticks(workers, [f"{number:,}" for number in workers])
    axes.set_xlabel(unit, fontsize=9)


def _caption(study: Study, quantity: Quantity) -> str:
    """What the marks of a figure mean, and why points are missing."""
    points = [point for group in study.groups for point in group.points]
    known = [point for point in points if quantity.of(point) is not None]
    grows = any(point.workers is not None for point in points)
    said = []
    if any(found.low < found.high for point in known if (found := quantity.of(point)) is not None):
        said.append("Bars: 95 % interval.")
    if quantity.ideal is not None:
        bases = dict.fromkeys(group.baseline for group in study.groups)
        said.append(f"Against {'; '.join(list(bases)[:3])}{' and others' if len(bases) > 3 else ''}.")
        if quantity.name == "speed_up" and any(_drawn(fit) for group in study.groups for fit in group.fits):
            said.append("Dotted: Amdahl's law, fitted.")
        if faster := [point.name for point in known if _super_linear(point, quantity)]:
            said.append(f"Stars: super-linear ({', '.join(faster)}).")
    if any(point.predicted and quantity.predicted(point.predicted) is not None for point in points):
        band = ", with the band of 8 of 10 such steps" if quantity.name == TIME and grows else ""
        said.append(f"{'Pale lines' if grows else 'Diamonds'}: predicted{band}.")
    missing: dict[str, list[str]] = {}
    for point in points:
        if quantity.of(point) is None:
            missing.setdefault(_why(point), []).append(point.name)
    if missing:
        said.append(f"Crosses, missing: {_reasons(missing)}.")
    return " ".join(said)


def _reasons(missing: Mapping[str, Sequence[str]]) -> str:
    """Why points are missing: each reason once, with the names of its points."""
    told = [
        f"{', '.join(names[:MOST_NAMED])}{f' and {len(names) - MOST_NAMED} more' * (len(names) > MOST_NAMED)}: {why}"
        for why, names in missing.items()
    ]
    more = sum(len(names) for names in list(missing.values())[MOST_REASONS:])
    return "; ".join(told[:MOST_REASONS]) + (f"; and {more} more" if more else "")


def _why(point: Point) -> str:
    """Why a point has no number, in a few words."""
    why = f" ({point.why.partition(';')[0].rstrip('.')})" if point.why and point.state is not PointState.DONE else ""
    return f"{_state(point)}{why}"


def _state(point: Point) -> str:
    """Why a point has no number, in a word or two."""
    return "not measured" if point.state is PointState.DONE else str(point.state)


def _over_points(study: Study, quantity: Quantity) -> Picture:
    """A bar for each point of a study in which nothing grows."""
    points = [point for group in study.groups for point in group.points]
    shown = points[:MOST_BARS]

    def draw(width_in: float = PICTURE_IN[0]) -> Figure:
        from matplotlib.figure import Figure

        figure, axes = bars_figure(list(map(_name, shown)), Figure, width_in)
        found = [quantity.of(point) for point in shown]
        value = np.array([np.nan if one is None else one.value for one in found]) * quantity.scale
        ends = [[np.nan] * 2 if one is None else [one.value - one.low, one.high - one.value] for one in found]
        errors = np.nan_to_num(np.clip(np.array(ends).T * quantity.scale, 0, None))
        bars = errors if errors.any() else None
        axes.barh(range(len(shown)), np.nan_to_num(value), xerr=bars, color=PALETTE[0], height=0.7, capsize=2.5)
        for row in np.flatnonzero(~np.isfinite(value)):
            along = axes.get_yaxis_transform()
            axes.plot([0.012], [row], "x", color=PALETTE[1], transform=along, clip_on=False)
            axes.annotate(
                _state(shown[row]), (0.012, row), (6, 0), xycoords=along, textcoords="offset points",
                fontsize=STATE_SIZE, color=PALETTE[1], va="center",
            )  # fmt: skip
        known = [None if point.predicted is None else quantity.predicted(point.predicted) for point in shown]
        places = [(quantity.scale * value, row) for row, value in enumerate(known) if value is not None]
        if places:
            axes.plot(*zip(*places), "D", color=PALETTE[1], mfc="#FFFFFF", ms=6, mew=1.4, zorder=4)
        axes.set_xlabel(quantity.axis, fontsize=9, loc="right")  # long names leave the axes narrower than this
        return figure

    left_out = f" The first {MOST_BARS} of {len(points)} points." if len(points) > MOST_BARS else ""
    caption = f"{_naming(shown)} {_caption(study, quantity)}{left_out}"
    return Picture(quantity.name, quantity.title, caption.strip(), draw)


def _name(point: Point) -> str:
    """The name of a bar. In a study in which nothing grows it has the values alone: with their axes it is too long."""
    return point.name if point.workers is not None else values_of(point.axes)


def _naming(points: Sequence[Point]) -> str:
    """What the names of bars are made of."""
    return f"Names: {axes_named(points[0].axes)}." if points[0].workers is None else ""


def _parts(points: Sequence[Point]) -> Picture:
    known = [point for point in points if point.parts_s]
    caption = f"{_naming(known)} Mean shares over ranks and repeats, of the median step.".strip()
    if missing := [point.name for point in points if not point.parts_s]:
        caption += (
            f" Missing, because not measured: {', '.join(missing[:6])}{' and others' if len(missing) > 6 else ''}."
        )
    return stacked("parts", "Where the time of a step goes", caption, {_name(point): point.parts_s for point in known})
