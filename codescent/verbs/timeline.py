"""In: a plan's schedule, the relative time of each instruction type. Out: a picture of one step, or a Perfetto trace.
Does not measure: it draws the simulation of cost/simulate.py. Pictures are PNG or SVG."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from codescent.base.durable import replace_file
from codescent.base.errors import UserError
from codescent.cost.simulate import Costs, Seconds, Simulation, Span, simulate
from codescent.plan import Plan, Schedule, Verb
from codescent.verbs.picture import PICTURES, no_file, no_matplotlib, picture_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.patches import Patch

COLOURS: dict[Verb, str] = {
    Verb.LOAD: "#999999",
    Verb.FORWARD: "#0072B2",
    Verb.BACKWARD: "#009E73",
    Verb.BACKWARD_INPUT: "#E69F00",
    Verb.BACKWARD_WEIGHT: "#CC79A7",
    Verb.SEND_ACTIVATION: "#F0E442",
    Verb.RECEIVE_ACTIVATION: "#F0E442",
    Verb.SEND_GRADIENT: "#F0E442",
    Verb.RECEIVE_GRADIENT: "#F0E442",
    Verb.REDUCE: "#D55E00",
    Verb.STEP: "#000000",
}
"""Colours of the palette of Okabe and Ito, which colour-blind readers can distinguish."""

USUAL = Costs()
WAITING = "#EEEEEE"

ROW_IN, MARGIN_IN, NARROWEST_IN, WIDEST_IN, UNNUMBERED_IN = 0.4, 0.8, 8.0, 46.0, 24.0
DIGIT_IN = 0.075  # width of a digit; if the boxes are narrower than two thirds of their numbers, numbers are left out
TRACE_US = 1000.0  # length of a relative unit in the trace: a millisecond


def refusals(path: Path) -> Iterator[str]:
    """Yield why a timeline cannot be written to `path`."""
    suffix = path.suffix.lower()
    if problem := no_file("--timeline", path):
        yield problem
    elif suffix not in (*PICTURES, ".json"):
        yield f"--timeline {path}: the name must end in .png or .svg (a picture) or .json (a trace for ui.perfetto.dev)"
    elif suffix == ".json" and not _may_replace(path):
        yield f"--timeline {path}: this file is not a timeline, and would be lost; give another name"
    elif suffix in PICTURES and (problem := no_matplotlib(", or write a .json trace")):
        yield f"--timeline {path}: {problem}"


def _may_replace(path: Path) -> bool:
    """Whether a .json file is absent, empty or a trace: not a config or the plan of a run."""
    try:
        with path.open("rb") as file:
            begin = file.read(100)
    except OSError:
        return True  # absent; if it cannot be written, the writer says why
    return not begin.strip() or b'"traceEvents"' in begin


def draw_plan(plan: Plan, path: Path) -> None:
    """Draw one step of a plan: see `write_timeline`. Frozen parameters make backward shorter."""
    stages, microbatches = len(plan.schedule.programs), plan.work.num_microbatches
    title = f"{plan.model.kind}: pipeline stages {stages}, micro-batches {microbatches}"
    share = plan.flops().weight_share
    costs = USUAL if share >= 1 else Costs(backward_s=1.0 + share, backward_weight_s=share)
    write_timeline(plan.schedule, title, path, costs)


def write_timeline(schedule: Schedule, title: str, path: Path, costs: Costs = USUAL) -> None:
    """Draw one step of `schedule` with relative `costs` to a .png, .svg or .json file. The file appears complete.

    Raises UserError: see `refusals`, or the file cannot be written.
    """
    if problems := list(refusals(path)):
        raise UserError(*problems)
    simulation = simulate(schedule, costs)
    if path.suffix.lower() == ".json":
        content: str | bytes = json.dumps(trace(simulation, title, costs), indent=1) + "\n"
    else:
        content = picture(simulation, title, costs, path.suffix.lower())
    try:
        replace_file(path, content)
    except OSError as error:
        raise UserError(f"--timeline {path}: cannot be written: {error.strerror}") from error


def trace(simulation: Simulation, title: str, costs: Costs) -> dict[str, Any]:
    """The simulation in the Trace Event Format of Chrome and Perfetto: a track for each stage, a slice per instruction.

    Instructions that take no time are instants. A relative unit is one millisecond.
    """
    events: list[dict[str, Any]] = [{"ph": "M", "pid": 0, "name": "process_name", "args": {"name": title}}]
    for stage in range(len(simulation.stages)):
        track = {"ph": "M", "pid": 0, "tid": stage}
        events.append({**track, "name": "thread_name", "args": {"name": f"stage {stage}"}})
        events.append({**track, "name": "thread_sort_index", "args": {"sort_index": stage}})
    events += [_event(span) for span in simulation.timeline]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"costs": dataclasses.asdict(costs)}}


def _event(span: Span) -> dict[str, Any]:
    at = span.instruction
    duration = span.end_s - span.start_s
    kind = {"ph": "X", "dur": duration * TRACE_US} if duration > 0 else {"ph": "i", "s": "t"}
    arguments = {"microbatch": at.microbatch, "chunk": at.chunk, "last": at.last, "peer": at.peer}
    event = {"name": str(at), "cat": str(at.verb), "pid": 0, "tid": span.stage, "ts": span.start_s * TRACE_US, **kind}
    return {**event, "args": {name: value for name, value in arguments.items() if value is not None}}


def picture(simulation: Simulation, title: str, costs: Costs, suffix: str) -> bytes:
    """A picture with a row for each stage and time to the right. Boxes that are wide enough show micro-batch numbers.

    `suffix` is one of `PICTURES`.
    """
    from matplotlib.figure import Figure

    spans = [span for span in simulation.timeline if span.end_s > span.start_s]
    shortest = min((span.end_s - span.start_s for span in spans), default=1.0)
    digits = max((len(_number(span)) for span in spans), default=1)
    wanted = simulation.makespan_s / shortest * (digits * DIGIT_IN + 0.08)
    numbered = wanted <= 1.5 * WIDEST_IN
    rows_wide = min(max(wanted, NARROWEST_IN), WIDEST_IN if numbered else UNNUMBERED_IN)
    rows_high = len(simulation.stages) * ROW_IN
    width, height = rows_wide + 2 * MARGIN_IN, rows_high + 2.0
    left = MARGIN_IN / width
    figure = Figure(figsize=(width, height), dpi=110)
    axes = figure.add_axes((left, 0.8 / height, rows_wide / width, rows_high / height))
    _frame(axes, simulation)
    _boxes(axes, spans, numbered=numbered)
    axes.legend(
        handles=_legend(spans), loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=9, frameon=False, fontsize=8,
        borderaxespad=0.2, borderpad=0.0, handlelength=1.2, handleheight=1.0,
    )  # fmt: skip
    figure.text(left, 1 - 0.3 / height, title, fontsize=12, fontweight="bold", va="center")
    figure.text(left, 1 - 0.6 / height, _measured(simulation), fontsize=9, va="center")
    figure.text(left, 0.2 / height, _stated(spans, costs, numbered=numbered), fontsize=8, va="center", color="#444444")
    return picture_bytes(figure, suffix)


def _frame(axes: Axes, simulation: Simulation) -> None:
    stages = range(len(simulation.stages))
    for stage in stages:
        axes.broken_barh([(0, simulation.makespan_s)], (stage - 0.42, 0.84), color=WAITING)
    axes.set_xlim(0, max(simulation.makespan_s, 1e-9))
    axes.set_ylim(len(stages) - 0.5, -0.5)
    axes.set_yticks(stages, [f"stage {stage}" for stage in stages])
    axes.tick_params(labelsize=8, length=0)
    axes.spines[["top", "right", "left", "bottom"]].set_visible(False)
    held = axes.secondary_yaxis("right")
    held.set_yticks(stages, [f"holds {stage.peak_live}" for stage in simulation.stages])
    held.tick_params(labelsize=8, length=0)
    held.spines["right"].set_visible(False)


def _boxes(axes: Axes, spans: list[Span], *, numbered: bool) -> None:
    alike: dict[tuple[int, Verb, bool], list[Span]] = {}
    for span in spans:
        alike.setdefault((span.stage, span.instruction.verb, span.instruction.chunk % 2 == 1), []).append(span)
    for (stage, verb, odd), group in alike.items():
        boxes = [(span.start_s, span.end_s - span.start_s) for span in group]
        axes.broken_barh(boxes, (stage - 0.42, 0.84), facecolor=_colour(verb, odd=odd), edgecolor="white", lw=0.6)
        ink = "black" if odd or verb in (Verb.BACKWARD_INPUT, Verb.BACKWARD_WEIGHT) else "white"
        for span, (start, duration) in zip(group if numbered else [], boxes):
            axes.text(start + duration / 2, stage, _number(span), ha="center", va="center", fontsize=8, color=ink)


def _legend(spans: list[Span]) -> list[Patch]:
    from matplotlib.patches import Patch

    kinds = {(span.instruction.verb, span.instruction.chunk % 2 == 1) for span in spans}
    ordered = sorted(kinds, key=lambda kind: (list(COLOURS).index(kind[0]), kind[1]))
    labels = [verb.replace("_", " ") + (", odd chunks" if odd else "") for verb, odd in ordered]
    patches = [Patch(color=_colour(verb, odd=odd), label=label) for (verb, odd), label in zip(ordered, labels)]
    return [*patches, Patch(facecolor=WAITING, label="waiting")]


def _colour(verb: Verb, *, odd: bool) -> str:
    """#RRGGBB; paler for the odd chunks of a rank."""
    parts = [int(COLOURS[verb][i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(part + (255 - part) * (0.55 if odd else 0)):02X}" for part in parts)


def _number(span: Span) -> str:
    return "" if span.instruction.microbatch is None else str(span.instruction.microbatch)


def _measured(simulation: Simulation) -> str:
    chunks = any(span.instruction.chunk for span in simulation.timeline)
    return (
        f"makespan {simulation.makespan_s:g}, bubble {simulation.bubble_of_total:.1%} of it; right: largest number of "
        f"micro-batches whose activations a stage holds{', counted by chunk' if chunks else ''}"
    )


def _stated(spans: list[Span], costs: Costs, *, numbered: bool) -> str:
    """A sentence with the relative costs, which the widths of the boxes show."""
    verbs = sorted({span.instruction.verb for span in spans}, key=list(COLOURS).index)
    stated = [f"{verb.replace('_', ' ')} {_amount(getattr(costs, f'{verb}_s'))}" for verb in verbs]
    if costs.latency_s or costs.transfer_s:
        stated.append(f"message {_amount(costs.latency_s)} + {_amount(costs.transfer_s)}")
    numbers = " Numbers are micro-batches." if numbered else ""
    return f"Relative costs: {', '.join(stated)}; nothing else takes time.{numbers}"


def _amount(seconds: Seconds) -> str:
    return "/".join(f"{each:g}" for each in seconds) if isinstance(seconds, tuple) else f"{seconds:g}"
