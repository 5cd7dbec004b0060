"""In: a simulated step, the relative length of each instruction. Out: a picture of the step, PNG or SVG, as bytes.
Does not simulate (cost/simulate.py does) and does not write a file (timeline.py does)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from codescent.cost.lengths import InstructionCollectives, Lengths
from codescent.cost.simulate import Simulation, Span
from codescent.plan import Instruction, Verb
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
from codescent.report.style import COLLECTIVE, COLOURS, SKY, WAITING, picture_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

LANES = {"collectives": COLLECTIVE, "messages": SKY}
"""What is drawn in thin lanes below the row of a stage, and its colour."""

UNIT_IN = 0.3
"""Width of a unit. It is the same in every picture, so that two pictures compare, unless the step is too long."""
BOX_IN, ROW_IN, LANE_IN, MARGIN_IN, NARROWEST_IN, WIDEST_IN = 0.34, 0.4, 0.13, 0.8, 9.0, 46.0
LEGEND_ROW_IN, AXIS_IN = 0.22, 0.5  # a row of the legend; ticks, numbers and name of the axis
DIGIT_IN = 0.075  # width of a digit; if the boxes are narrower than two thirds of their numbers, numbers are left out

Slices = Sequence[tuple[int, float, float]]
"""Stage, begin and duration of each."""


@dataclass(frozen=True)
class Sheet:
    """The axes of a picture. Units of time go to the right, inches down; a stage has a row and its lanes.

    `numbered`: whether boxes are wide enough for the numbers of their micro-batches.
    """

    axes: Axes
    row_in: float
    numbered: bool

    def place(self, stage: int) -> float:
        """The middle of a stage's row."""
        return stage * self.row_in


def communication(
    simulation: Simulation, exchanges: Mapping[tuple[int, Instruction], InstructionCollectives]
) -> dict[str, Slices]:
    """The slices of each lane that has any: collectives that overlap with computing, and messages between stages."""
    collectives = [
        (span.stage, span.start_s, exchange.overlapped_s)
        for span in simulation.timeline
        if (exchange := exchanges.get((span.stage, span.instruction))) is not None and exchange.overlapped_s
    ]
    messages = [(at.stage, at.start_s, at.end_s - at.start_s) for at in simulation.messages if at.end_s > at.start_s]
    return {name: found for name, found in zip(LANES, (collectives, messages)) if found}


def measured(simulation: Simulation) -> str:
    """The duration of the step and, of several stages, its bubble, in words."""
    exposed = max(stage.comm_wait_s for stage in simulation.stages) / (simulation.makespan_s or 1.0)
    several = len(simulation.stages) > 1
    bubble = f", {simulation.bubble_of_total:.1%} of them bubble" if several else ""
    where = " on a stage" if several else ""
    waits = f"; waiting for communication up to {exposed:.1%} of them{where}" if exposed >= 0.0005 else ""
    return f"{simulation.makespan_s:.4g} units{bubble}{waits}"


def picture(
    simulation: Simulation,
    title: str,
    given: Lengths,
    suffix: str,
    said: str = "",
    widest_in: float = WIDEST_IN,
    config: str = "",
) -> bytes:
    """A picture with a row for each stage and time to the right. Boxes that are wide enough show micro-batch numbers.

    Below a row are the stage's collectives that overlap with computing, and the messages that it sends. Collectives for
    which the stage waits are boxes of its row. `suffix` is one of `picture.PICTURES`. `said`: the line below the title,
    if it is not `measured`. `widest_in`: most inches of the axis. `config`: what is simulated, in a line.
    """
    figure, drawn = sheet(simulation, title, given, said or measured(simulation), widest_in, config)
    spans = [span for span in simulation.timeline if span.end_s > span.start_s]
    _boxes(drawn, spans)
    _lanes(drawn, communication(simulation, given.exchanges))
    return picture_bytes(figure, suffix)


def sheet(
    simulation: Simulation, title: str, given: Lengths, said: str, widest_in: float, config: str
) -> tuple[Figure, Sheet]:
    """The figure without its boxes. What is written above and below the rows is wrapped to its width."""
    from matplotlib.figure import Figure

    spans = [span for span in simulation.timeline if span.end_s > span.start_s]
    lanes = communication(simulation, given.exchanges)
    unit_in = min(UNIT_IN, widest_in / max(simulation.makespan_s, 1e-9))
    wide, row_in = max(simulation.makespan_s * unit_in, NARROWEST_IN), ROW_IN + len(lanes) * LANE_IN
    width, high = wide + 2 * MARGIN_IN, len(simulation.stages) * row_in
    numbered = _numbered(spans, unit_in)
    handles = _legend(spans, lanes)
    labels, columns = legend_labels([str(patch.get_label()) for patch in handles], wide)
    above = [title_block(title), *([small_block(config)] if config else []), FrameText(said, 9.0)]
    numbers = "numbers are micro-batches; " if numbered else ""
    below = [small_block(f"1 unit: {given.unit}"), small_block(f"{numbers}right: {_held(simulation)}")]
    legend_in = LEGEND_ROW_IN * -(-len(labels) // columns)
    room_in = wide + MARGIN_IN - EDGE_IN
    top_in, bottom_in = legend_in + height_of(above, room_in) + EDGE_IN, AXIS_IN + height_of(below, room_in)
    height = high + top_in + bottom_in
    figure = Figure(figsize=(width, height), dpi=110)
    axes = figure.add_axes((MARGIN_IN / width, bottom_in / height, wide / width, high / height))
    axes.legend(
        handles, labels, loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=columns, frameon=False,
        fontsize=LEGEND_SIZE, borderaxespad=0.2, borderpad=0.0, handlelength=1.2, handleheight=1.0,
    )  # fmt: skip
    write(figure, above, MARGIN_IN, EDGE_IN)
    write(figure, below, MARGIN_IN, top_in + high + AXIS_IN)
    drawn = Sheet(axes, row_in, numbered)
    _frame(drawn, simulation, wide / unit_in)
    return figure, drawn


def _numbered(spans: Sequence[Span], unit_in: float) -> bool:
    """Whether the narrowest box of a micro-batch has room for two thirds of the longest number."""
    boxes = [span for span in spans if _number(span) and span.end_s - span.waits_s > span.start_s]
    shortest = min((span.end_s - span.waits_s - span.start_s for span in boxes), default=1.0)
    return shortest * unit_in * 1.5 >= DIGIT_IN * max((len(_number(span)) for span in boxes), default=1)


def _frame(sheet: Sheet, simulation: Simulation, units: float) -> None:
    axes, stages = sheet.axes, range(len(simulation.stages))
    places = [sheet.place(stage) for stage in stages]
    for place in places:
        axes.broken_barh([(0, simulation.makespan_s)], (place - BOX_IN / 2, BOX_IN), color=WAITING)
    axes.set_xlim(0, units)
    axes.set_ylim(len(stages) * sheet.row_in - ROW_IN / 2, -ROW_IN / 2)
    axes.set_yticks(places, [f"{simulation.lane} {stage}" for stage in stages])
    axes.set_xlabel("units", fontsize=8, loc="left")
    axes.tick_params(labelsize=8, length=0)
    axes.tick_params(axis="x", length=3)
    axes.spines[["top", "right", "left", "bottom"]].set_visible(False)
    held = axes.secondary_yaxis("right")
    held.set_yticks(places, [f"holds {stage.peak_live}" for stage in simulation.stages])
    held.tick_params(labelsize=8, length=0)
    held.spines["right"].set_visible(False)


def _boxes(sheet: Sheet, spans: Sequence[Span]) -> None:
    """Draw what each stage computes, and after it the collectives for which it waits."""
    alike: dict[tuple[int, Verb, bool], list[Span]] = {}
    for span in spans:
        alike.setdefault((span.stage, span.instruction.verb, span.instruction.chunk % 2 == 1), []).append(span)
    for (stage, verb, odd), group in alike.items():
        row = (sheet.place(stage) - BOX_IN / 2, BOX_IN)
        computing = [(span.start_s, span.end_s - span.waits_s - span.start_s) for span in group]
        waiting = [(span.end_s - span.waits_s, span.waits_s) for span in group if span.waits_s]
        style: dict[str, Any] = {"edgecolor": "white", "lw": 0.6}
        sheet.axes.broken_barh([box for box in computing if box[1]], row, facecolor=_colour(verb, odd=odd), **style)
        sheet.axes.broken_barh(waiting, row, facecolor=COLLECTIVE, **style)
        ink = "black" if odd or verb in (Verb.BACKWARD_INPUT, Verb.BACKWARD_WEIGHT) else "white"
        for span, (start, duration) in zip(group if sheet.numbered else [], computing):
            middle, text = (start + duration / 2, sheet.place(stage)), _number(span)
            sheet.axes.text(*middle, text, ha="center", va="center", fontsize=8, color=ink)


def _lanes(sheet: Sheet, lanes: Mapping[str, Slices]) -> None:
    for number, (name, slices) in enumerate(lanes.items()):
        for stage in dict.fromkeys(stage for stage, _, _ in slices):
            top = sheet.place(stage) + BOX_IN / 2 + 0.02 + number * LANE_IN
            boxes = [(start, duration) for at, start, duration in slices if at == stage]
            # The edge has the same colour, so that a short message stays visible.
            sheet.axes.broken_barh(boxes, (top, LANE_IN - 0.03), color=LANES[name], lw=0.8, clip_on=False)


def _legend(spans: Sequence[Span], lanes: Mapping[str, Slices]) -> list[Patch]:
    from matplotlib.patches import Patch

    computing = [span.instruction for span in spans if span.end_s - span.waits_s > span.start_s]
    kinds = {(at.verb, at.chunk % 2 == 1) for at in computing}
    ordered = sorted(kinds, key=lambda kind: (list(COLOURS).index(kind[0]), kind[1]))
    labels = [verb.replace("_", " ") + (", odd chunks" if odd else "") for verb, odd in ordered]
    patches = [Patch(color=_colour(verb, odd=odd), label=label) for (verb, odd), label in zip(ordered, labels)]
    names = [name for name in LANES if name in lanes or (name == "collectives" and any(span.waits_s for span in spans))]
    patches += [Patch(color=LANES[name], label=name) for name in names]
    return [*patches, Patch(facecolor=WAITING, label="waiting")]


def _colour(verb: Verb, *, odd: bool) -> str:
    """#RRGGBB; paler for the odd chunks of a rank."""
    parts = [int(COLOURS[verb][i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(part + (255 - part) * (0.55 if odd else 0)):02X}" for part in parts)


def _number(span: Span) -> str:
    return "" if span.instruction.microbatch is None else str(span.instruction.microbatch)


def _held(simulation: Simulation) -> str:
    chunks = any(span.instruction.chunk for span in simulation.timeline)
    return f"most micro-batches whose activations a {simulation.lane} holds{', counted by chunk' if chunks else ''}"
