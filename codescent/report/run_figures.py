"""In: the numbers of runs. Out: figures: loss over tokens and time, where the time goes, memory of ranks, one step.
Does not read run folders (summary.py does) and does not write files."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from codescent.cost.doing import Doing
from codescent.report.bars import MOST_BARS, bars_figure, bytes_axis, shortened, stacked
from codescent.report.content import Picture, Timeline
from codescent.report.frame import legend_above
from codescent.report.step_boxes import is_idle
from codescent.report.style import (
    COLOURS,
    DOING,
    IDLE,
    LINE_GREY,
    LOSS_UNIT,
    MEMORY,
    PALETTE,
    PARTS,
    PICTURE_IN,
    TEXT_GREY,
    VERB_NAMES,
    WAITING,
    literal,
    plain,
)
from codescent.report.summary import Summary
from codescent.report.walk import StepTimeline
from codescent.results import PARTS as PART_NAMES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

MOST_CURVES = 8
"""Runs with a colour and a name in a figure of losses. Of more, some have one, and the others are grey."""
GREY_POINTS = 40
"""Points of a grey curve."""
SEEN = 0.001
"""Shares of a time axis that are shorter cannot be seen."""
MOST_NUMBERED = 400
"""Boxes of a picture of a step that have numbers."""


def pictures(summaries: Sequence[Summary], *, parts: bool = True) -> Iterator[Picture]:
    """The figures of runs that have numbers. `parts`: also where the time goes, if no study says it."""
    if parts and (known := [one for one in summaries if one.ranks]):
        yield _parts(known)
    if any(len(one.ranks) > 1 for one in summaries):
        yield _parts_of_ranks([one for one in summaries if one.ranks])
    if any(np.isfinite(one.run.columns["train_loss"]).any() for one in summaries):
        trained = [one for one in summaries if len(one.run.columns["step"])]
        yield _losses(trained, "tokens", "Loss over tokens")
        yield _losses(trained, "time", "Loss over training time")
    if split := [one for one in summaries if one.memory]:
        yield _memory_parts(split)
    if any(one.memory_bytes for one in summaries):
        yield _memory([one for one in summaries if one.memory_bytes])


def _parts(known: Sequence[Summary]) -> Picture:
    rows = {one.name: {name: np.mean([getattr(at, name) for at in one.ranks]) for name in PART_NAMES} for one in known}
    caption = "Seconds of each part of a step: means over ranks and steps, without the first steps."
    return stacked("parts_of_runs", "Where the time of a step goes", caption, rows)


def _parts_of_ranks(known: Sequence[Summary]) -> Picture:
    rows = {
        f"{shortened(one.name, 26)} rank {at.rank}": {name: getattr(at, name) for name in PART_NAMES}
        for one in known
        if len(one.ranks) > 1
        for at in one.ranks
    }
    return stacked("parts_of_ranks", "Where it goes on each rank", "A slow rank computes long; the others wait.", rows)


def chosen(summaries: Sequence[Summary]) -> list[int]:
    """The runs that get a colour in a figure of losses: all of a few; else those with the lowest and highest losses."""
    if len(summaries) <= MOST_CURVES:
        return list(range(len(summaries)))
    order = sorted(range(len(summaries)), key=lambda i: (math.isnan(summaries[i].train_loss), summaries[i].train_loss))
    return sorted([*order[: MOST_CURVES // 2], *order[-MOST_CURVES // 2 :]])


def _losses(summaries: Sequence[Summary], over: str, title: str) -> Picture:
    """Training losses (lines) and validation losses (dots) of the runs."""
    some = chosen(summaries)
    caption = "Lines: training loss, a mean of neighbouring rows. Dots: validation loss."
    if over != "time":
        caption += " Of runs with the same losses the earlier is a broader line."
    if len(some) < len(summaries):
        caption += f" Coloured: the lowest and the highest of {len(summaries)} runs; the others are grey."

    def draw(width_in: float = PICTURE_IN[0]) -> Figure:
        from matplotlib.figure import Figure
        from matplotlib.lines import Line2D

        from codescent.report import curves as drawn

        figure = Figure(figsize=(width_in, PICTURE_IN[1]), dpi=110, layout="constrained")
        axes = figure.add_subplot()
        runs = [summaries[i].curves for i in some]
        looks = drawn.looks_of(runs, [] if over == "time" else drawn.coinciding(runs))
        scale = drawn.draw_loss(axes, runs, looks, over)
        for i in sorted(set(range(len(summaries))) - set(some)):
            x, y = drawn.x_of(summaries[i].curves, over), drawn.smooth(summaries[i].curves.columns["train_loss"])[0]
            at = drawn.thinned(y, GREY_POINTS)
            axes.plot(x[at] / scale, y[at], color=TEXT_GREY, alpha=0.35, lw=0.7, zorder=1)
        axes.set_title("", loc="left")
        axes.set_ylabel(f"loss ({LOSS_UNIT})", fontsize=9)
        lines = [Line2D([], [], color=look.colour, ls=look.dashes, lw=min(look.width, 4.0)) for look in looks]
        legend_above(figure, lines, [literal(run.name) for run in runs])
        return figure

    return Picture(f"loss_{over}", title, caption, draw)


def _memory_parts(split: Sequence[Summary]) -> Picture:
    rows = {
        f"{shortened(one.name, 26)} rank {rank}": {name: float(row[name] or 0) for name in MEMORY}
        for one in split
        for rank, row in one.memory.items()
    }
    caption = "Memory of each rank by part, when most was counted. The rest: libraries, kernels and what was freed."
    return stacked("memory_parts", "Memory by part", caption, rows, MEMORY, bytes_axis)


def _memory(summaries: Sequence[Summary]) -> Picture:
    shown = summaries[:MOST_BARS]
    caption = (
        "Dots: the peak of each rank. Bars: weights, gradients and optimizer state of the fullest rank, by the Plan."
    )
    if len(shown) < len(summaries):
        caption += f" The first {MOST_BARS} of {len(summaries)} runs."

    def draw(width_in: float = PICTURE_IN[0]) -> Figure:
        from matplotlib.figure import Figure

        figure, axes = bars_figure([one.name for one in shown], Figure, width_in)
        largest = max(max(one.memory_bytes) for one in shown)
        scale, unit = bytes_axis(largest)
        for row, one in enumerate(shown):
            if one.state_bytes is not None:
                axes.barh([row], [one.state_bytes.device_bytes * scale], color=PALETTE[5], height=0.5)
            peaks = [number * scale for number in one.memory_bytes]
            axes.plot(peaks, [row] * len(peaks), "o", color=PALETTE[0], ms=4, alpha=0.8)
        axes.set_xlim(left=0)
        axes.set_xlabel(unit, fontsize=9)
        return figure

    return Picture("memory_of_ranks", "Memory of each rank", caption, draw)


def step_picture(timeline: Timeline, name: str) -> Picture:
    """The timelines of a step below each other, on one time axis: computed above measured."""

    def draw(width_in: float = 2 * PICTURE_IN[0]) -> Figure:
        from matplotlib.figure import Figure

        walks = timeline.walks
        heights = [max(1, len(walk.ranks)) for walk in walks]
        figure = Figure(
            figsize=(width_in, 1.2 + 0.27 * sum(heights) + 0.45 * len(walks)), dpi=110, layout="constrained"
        )
        panels = figure.subplots(len(walks), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
        longest = max(walk.step_s for walk in walks)
        scale, unit = (1e3, "milliseconds") if longest < 1 else (1.0, "seconds")
        for axes, walk in zip(panels, walks, strict=True):
            _draw_walk(axes, walk, scale)
            axes.set_xlim(0, longest * scale)
        panels[-1].set_xlabel(f"{unit} from the begin of the step", fontsize=9)
        patches = _walk_legend(walks)
        legend_above(figure, patches, [str(patch.get_label()) for patch in patches])
        return figure

    caption = " ".join([*(walk.source for walk in timeline.walks), timeline.caption]).strip()
    return Picture(name, f"One step of {timeline.run}", caption, draw, timeline.config)


def kind_colour(kind: str) -> str:
    """The colour of a box of a timeline."""
    return _look(kind)[1]


def kind_name(kind: str) -> str:
    """The name of a box of a timeline, as in the pictures of `codescent plan --timeline`."""
    return _look(kind)[0]


def _look(kind: str) -> tuple[str, str]:
    """The name and the colour of a box."""
    looks = {str(why): look for why, look in DOING.items()}
    looks |= {str(verb): (VERB_NAMES[verb], colour) for verb, colour in COLOURS.items()}
    return looks.get(kind, PARTS["other_s"])


def legend(walks: Sequence[StepTimeline]) -> dict[str, str]:
    """For each name of the boxes of timelines a kind that has it: what is computed, then the waits."""
    found_kinds = dict.fromkeys(box.kind for walk in walks for box in walk.boxes)
    kinds = sorted(found_kinds, key=lambda kind: kind in set(Doing))
    found: dict[str, str] = {}
    for kind in kinds:
        found.setdefault(kind_name(kind), kind)
    return found


def has_idle(walks: Sequence[StepTimeline]) -> bool:
    """Whether a rank has time without a box that can be seen."""
    least_s = SEEN * max((walk.step_s for walk in walks), default=0.0)
    return any(
        is_idle(
            ((box.rank, box.start_s, box.start_s + box.length_s) for box in walk.boxes),
            walk.ranks,
            walk.step_s,
            least_s,
        )
        for walk in walks
    )


def _draw_walk(axes: Axes, walk: StepTimeline, scale: float) -> None:
    plain(axes)
    axes.grid(visible=False, axis="y")
    axes.set_title(f"{walk.title}: {walk.step_s * scale:,.1f} {'ms' if scale > 1 else 's'}", fontsize=9, loc="left")
    axes.set_yticks(range(len(walk.ranks)), [f"rank {rank}" for rank in walk.ranks])
    axes.set_ylim(len(walk.ranks) - 0.4, -0.6)
    numbered = sum(box.number is not None for box in walk.boxes) <= MOST_NUMBERED
    for row, rank in enumerate(walk.ranks):
        axes.barh([row], [walk.step_s * scale], color=WAITING, height=0.8)
        own = [box for box in walk.boxes if box.rank == rank]
        for kind in dict.fromkeys(box.kind for box in own):
            spans = [(box.start_s * scale, box.length_s * scale) for box in own if box.kind == kind]
            axes.broken_barh(spans, (row - 0.4, 0.8), facecolor=kind_colour(kind), edgecolor="white", lw=0.4)
        for box in own if numbered else []:
            if box.number is not None and box.length_s > 0.012 * walk.step_s:
                middle = (box.start_s + box.length_s / 2) * scale
                axes.text(middle, row, str(box.number), ha="center", va="center", fontsize=6.5, color="white")


def _walk_legend(walks: Sequence[StepTimeline]) -> list[Patch]:
    from matplotlib.patches import Patch

    patches = [Patch(color=kind_colour(kind), label=name) for name, kind in legend(walks).items()]
    idle = Patch(facecolor=WAITING, edgecolor=LINE_GREY, label=IDLE[0])
    return [*patches, *([idle] if has_idle(walks) else [])]
