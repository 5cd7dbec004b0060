"""In: a simulated step, the relative length of each instruction. Out: a figure of the step; the tracks of its trace.
Does not simulate (cost/simulate.py does) and does not write a file (timeline.py does)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from codescent.cost.doing import SERVES
from codescent.cost.lengths import Lengths
from codescent.cost.simulate import Simulation
from codescent.plan import Verb
from codescent.report.frame import (
    EDGE_IN,
    LEGEND_SIZE,
    FrameText,
    height_of,
    legend_labels,
    small_block,
    title_block,
    write,
)
from codescent.report.step_boxes import (
    ANOTHER_STAGE,
    GATHER,
    IDLE_LOOK,
    PictureBand,
    PictureBox,
    PictureLook,
    boxes_of,
    is_idle,
    verb_look,
    wait_look,
)
from codescent.report.style import COLOURS, DOING, WAITING
from codescent.trace.intervals import union

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

UNIT_IN = 0.3
"""Width of a unit. It is the same in every picture of stages, so that two compare, unless the step is too long."""
BOX_IN, ROW_IN, LANE_IN, MARGIN_IN, NARROWEST_IN, WIDEST_IN = 0.34, 0.4, 0.13, 0.8, 9.0, 46.0
LEGEND_ROW_IN, AXIS_IN = 0.22, 0.5  # a row of the legend; ticks, numbers and name of the axis
DIGIT_IN = 0.075  # width of a digit; if the boxes are narrower than two thirds of their numbers, numbers are left out
SMALL_DIGIT_IN = 0.05  # in a lane
EDGED_IN = 0.03
"""Narrower boxes have no white edge, which would hide them."""
NUMBERED = "numbers are micro-batches"
NOT_NUMBERED = "the boxes are too narrow for the numbers of their micro-batches"
DPI = 110
SEEN_IN = 1 / DPI
LEAST_IN = SEEN_IN / 4
"""A quarter of a pixel. What is narrower is not drawn: nobody could see it, but the legend would name it."""
ROUNDED = 1e-9
"""Units by which times may differ that are equal."""
_DARK = (COLOURS[Verb.FORWARD], COLOURS[Verb.BACKWARD], COLOURS[Verb.STEP], COLOURS[Verb.LOAD])


@dataclass(frozen=True)
class Sheet:
    """The axes of a picture. Units of time go to the right, inches down; a row has its lanes below it.

    Attributes:
        unit_in: inches of a unit.
        lanes: those that any row has.
        numbered: whether boxes are wide enough for the numbers of their micro-batches.
    """

    axes: Axes
    unit_in: float
    lanes: Sequence[PictureBand]
    numbered: bool

    @property
    def row_in(self) -> float:
        """A row with its lanes."""
        return ROW_IN + len(self.lanes) * LANE_IN

    def place(self, row: int) -> float:
        """The middle of a row."""
        return row * self.row_in

    def heights(self, box: PictureBox) -> tuple[float, float]:
        """Top and height of a box."""
        top, high = self.place(box.row) - BOX_IN / 2, BOX_IN
        if box.band is not PictureBand.ROW:
            top, high = top + BOX_IN + 0.02 + self.lanes.index(box.band) * LANE_IN, LANE_IN - 0.03
        return (top, high) if box.third is None else (top + box.third * high / 3, high / 3)


def measured(simulation: Simulation) -> str:
    """The duration of the step and, of several stages, its bubble, in words."""
    exposed = max(stage.comm_wait_s for stage in simulation.stages) / (simulation.makespan_s or 1.0)
    several = len(simulation.stages) > 1
    bubble = f", {simulation.bubble_of_total:.1%} of them bubble" if several else ""
    where = " on a stage" if several else ""
    waits = f"; waiting for communication up to {exposed:.1%} of them{where}" if exposed >= 0.0005 else ""
    return f"{simulation.makespan_s:.4g} units{bubble}{waits}"


def sheet(
    simulation: Simulation,
    title: str,
    given: Lengths,
    said: str = "",
    widest_in: float = WIDEST_IN,
    config: str = "",
) -> Figure:
    """A figure with a row for each stage or rank, and time to the right. The legend has what is drawn, and no more.

    A row has what is computed and for what it waits; that of a server what it receives, applies and answers. Below a
    row are collectives that overlap with computing, and messages that it sends; of ranks all that their cards send.
    What is written above and below the rows is wrapped to their width.

    Args:
        simulation: one step, or some.
        title: what is drawn.
        given: the unit, and the collectives of stages.
        said: the line below the title, if it is not `measured`.
        widest_in: most inches of the axis.
        config: what is simulated, in a line.
    """
    from matplotlib.figure import Figure

    end, rows = simulation.makespan_s, len(simulation.stages)
    unit_in = min(UNIT_IN, widest_in / max(end, 1e-9))
    if simulation.lane == "rank":  # a short step fills the picture: what is gathered for it is far shorter
        unit_in = max(unit_in, NARROWEST_IN / max(end, 1e-9))
    every = boxes_of(simulation, given.exchanges)
    boxes = _seen(every, unit_in)
    lanes = [band for band in PictureBand if band is not PictureBand.ROW and any(box.band is band for box in boxes)]
    wide = max(end * unit_in, NARROWEST_IN)
    width, high = wide + 2 * MARGIN_IN, rows * (ROW_IN + len(lanes) * LANE_IN)
    numbered = _numbered(boxes, unit_in)
    drawn_in = ((box.row, box.start, box.end) for box in every if box.band is PictureBand.ROW)
    idle = [IDLE_LOOK] if is_idle(drawn_in, range(rows), end, SEEN_IN / unit_in) else []
    handles = _legend([*(box.look for box in boxes), *idle], simulation.lane)
    labels, columns = legend_labels([str(patch.get_label()) for patch in handles], wide)
    above = [
        title_block(title),
        *([small_block(config)] if config else []),
        FrameText(said or measured(simulation), 9.0),
    ]
    caption = _caption(boxes, simulation, numbered=numbered)
    below = [small_block(f"1 unit: {given.unit}"), small_block(caption)]
    room_in = wide + MARGIN_IN - EDGE_IN
    top_in = LEGEND_ROW_IN * -(-len(labels) // columns) + height_of(above, room_in) + EDGE_IN
    bottom_in = AXIS_IN + height_of(below, room_in)
    height = high + top_in + bottom_in
    figure = Figure(figsize=(width, height), dpi=DPI)
    axes = figure.add_axes((MARGIN_IN / width, bottom_in / height, wide / width, high / height))
    axes.legend(
        handles, labels, loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=columns, frameon=False,
        fontsize=LEGEND_SIZE, borderaxespad=0.2, borderpad=0.0, handlelength=1.2, handleheight=1.0,
    )  # fmt: skip
    write(figure, above, MARGIN_IN, EDGE_IN)
    write(figure, below, MARGIN_IN, top_in + high + AXIS_IN)
    drawn = Sheet(axes, unit_in, lanes, numbered)
    _frame(drawn, simulation, wide / unit_in)
    _draw(drawn, boxes)
    return figure


def _seen(boxes: Sequence[PictureBox], unit_in: float) -> list[PictureBox]:
    """Without what nobody could see: of a row all boxes of a look that are together too narrow.

    Boxes outside of the row of a rank have an edge, so that what is short stays visible.
    """
    wide_in = defaultdict[tuple[int, PictureLook], float](float)
    for box in boxes:
        wide_in[box.row, box.look] += (box.end - box.start) * unit_in
    return [
        box
        for box in boxes
        if box.band is not PictureBand.ROW or box.third is not None or wide_in[box.row, box.look] >= LEAST_IN
    ]


def _numbered(boxes: Sequence[PictureBox], unit_in: float) -> bool:
    """Whether the narrowest box of a micro-batch has room for two thirds of the longest number."""
    end = max((box.end for box in boxes), default=0.0)
    row = [box for box in boxes if box.text and box.band is PictureBand.ROW]
    having = [box for box in row if box.start > 0 and box.end < end] or row  # others may be cut at the edges
    shortest = min((box.end - box.start for box in having), default=1.0)
    return shortest * unit_in * 1.5 >= DIGIT_IN * max((len(box.text) for box in having), default=1)


def _frame(sheet: Sheet, simulation: Simulation, units: float) -> None:
    axes, rows = sheet.axes, range(len(simulation.stages))
    places = [sheet.place(row) for row in rows]
    for row, place in zip(rows, places):
        background = axes.broken_barh([(0, simulation.makespan_s)], (place - BOX_IN / 2, BOX_IN), color=WAITING, lw=0)
        background.set_gid(f"row {row}")
    axes.set_xlim(0, units)
    axes.set_ylim(len(rows) * sheet.row_in - ROW_IN / 2, -ROW_IN / 2)
    axes.set_yticks(places, [simulation.name(row) for row in rows])
    axes.set_xlabel("units", fontsize=8, loc="left")
    axes.tick_params(labelsize=8, length=0)
    axes.tick_params(axis="x", length=3)
    axes.spines[["top", "right", "left", "bottom"]].set_visible(False)
    held = axes.secondary_yaxis("right")
    live = [stage.peak_live for stage in simulation.stages]
    held.set_yticks(places, [f"holds {number}" if number else "" for number in live])
    held.tick_params(labelsize=8, length=0)
    held.spines["right"].set_visible(False)


def _draw(sheet: Sheet, boxes: Iterable[PictureBox]) -> None:
    """Draw boxes that look alike and lie in one band together, the numbers upon them."""
    alike = defaultdict[tuple[int, PictureBand, PictureLook, bool], list[PictureBox]](list)
    for box in boxes:
        is_wide = (box.end - box.start) * sheet.unit_in >= EDGED_IN
        is_edged = is_wide and box.third is None and (box.band is PictureBand.ROW or bool(box.text))
        alike[box.row, box.band, box.look, is_edged].append(box)
    for (row, band, look, is_edged), group in alike.items():
        plain = 0.0 if band is PictureBand.ROW and group[0].third is None else 0.8
        edge: dict[str, Any] = (
            {"edgecolor": "white", "lw": 0.6} if is_edged else {"edgecolor": look.colour, "lw": plain}
        )
        times = [(box.start, box.end - box.start) for box in group]
        drawn = sheet.axes.broken_barh(times, sheet.heights(group[0]), facecolor=look.colour, **edge)
        drawn.set_gid(f"{look.name}, {band} of {row}{', edged' if is_edged else ''}")
    for box in (box for group in alike.values() for box in group):
        _write(sheet, box)


def _write(sheet: Sheet, box: PictureBox) -> None:
    is_row = box.band is PictureBand.ROW
    has_room = sheet.numbered if is_row else (box.end - box.start) * sheet.unit_in > SMALL_DIGIT_IN * len(box.text)
    if box.text and has_room:
        top, high = sheet.heights(box)
        ink = "white" if box.look.colour in _DARK else "black"
        place = (box.start + box.end) / 2, top + high / 2
        size = 8 if is_row else 6
        sheet.axes.text(*place, box.text, ha="center", va="center_baseline", fontsize=size, color=ink, clip_on=True)


def _legend(looks: Iterable[PictureLook], lane: str) -> list[Patch]:
    """A patch for each look that is drawn, in the order of a step."""
    from matplotlib.patches import Patch

    verbs = [verb_look(verb, is_odd=is_odd) for verb in COLOURS for is_odd in (False, True)]
    doing = [wait_look(why, name) for why in DOING for name in ("", lane)]
    drawn = set(looks)
    ordered = dict.fromkeys([*verbs, *doing, GATHER, IDLE_LOOK])
    return [Patch(facecolor=look.colour, label=look.name) for look in ordered if look in drawn]


def _caption(boxes: Sequence[PictureBox], simulation: Simulation, *, numbered: bool) -> str:
    """What the numbers mean."""
    chunks = any(span.instruction.chunk for span in simulation.timeline)
    held = f"most micro-batches whose activations a {simulation.lane} holds{', counted by chunk' if chunks else ''}"
    is_told = any(box.text and box.band is PictureBand.ROW for box in boxes)
    numbers = [NUMBERED if numbered else NOT_NUMBERED] if is_told else []
    units = ["below a row: blocks whose weights are gathered, or gradients summed"]
    has_units = any(box.text and box.band is PictureBand.COLLECTIVES for box in boxes)
    return "; ".join([*numbers, *(units if has_units else []), f"right: {held}"])


def tracks(boxes: Iterable[PictureBox]) -> Mapping[str, list[PictureBox]]:
    """What a trace has beside the instructions, by the name of its track."""
    serving = [DOING[why][0] for why in SERVES]
    bands = [band for band in PictureBand if band not in (PictureBand.ROW, PictureBand.SERVES)]
    found: dict[str, list[PictureBox]] = {name: [] for name in ("waits", *bands, *serving)}
    waits = {ANOTHER_STAGE, *(name for name, _ in DOING.values())}
    for box in boxes:
        if box.third is not None:  # a track for each thing that it does: they overlap
            found[serving[box.third]].append(box)
        elif box.band is not PictureBand.ROW:
            found[box.band].append(box)
        elif box.look.name in waits:
            found["waits"].append(box)
    for name in serving:
        found[name] = _joined(found[name])
    return {
        name if number == 1 else f"{name} {number}": track
        for name, group in found.items()
        for number, track in enumerate(_apart(group), start=1)
    }


def _apart(boxes: Iterable[PictureBox]) -> list[list[PictureBox]]:
    """The boxes in as many tracks as overlap. In each, slices of a row begin after the end of those before."""
    found: list[list[PictureBox]] = []
    ends: list[dict[int, float]] = []
    for box in sorted(boxes, key=lambda box: box.start):
        free = (number for number, end in enumerate(ends) if end.get(box.row, box.start) <= box.start + ROUNDED)
        if (number := next(free, len(ends))) == len(ends):
            found.append([])
            ends.append({})
        found[number].append(box)
        ends[number][box.row] = box.end
    return found


def _joined(boxes: Sequence[PictureBox]) -> list[PictureBox]:
    """Of each row the times in which there is a box, as boxes that do not overlap: slices of a track may not."""
    times = defaultdict[int, list[tuple[float, float]]](list)
    for box in boxes:
        times[box.row].append((box.start, box.end))
    return [
        replace(boxes[0], row=row, start=start, end=end)
        for row, of_row in times.items()
        for start, end in union(of_row)
    ]
