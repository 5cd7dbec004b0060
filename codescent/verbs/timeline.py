"""In: a plan's schedule, the relative length of each instruction. Out: a file: a picture or a Perfetto trace of a step.
Does not measure: it shows the simulation of cost/simulate.py. Does not draw (report/step_picture.py does)."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from codescent.base.amounts import of_number, of_seconds
from codescent.base.counted import counted
from codescent.base.durable import replace_file
from codescent.base.errors import UserError
from codescent.clusters.by_links import of_links
from codescent.clusters.link import AT_ONCE, Link
from codescent.cost.amounts import one_step, phases
from codescent.cost.coding import Coding
from codescent.cost.doing import Window
from codescent.cost.lengths import FLOPS_PER_BYTE, Lengths, lengths
from codescent.cost.price import Price
from codescent.cost.simulate import Simulation, Span, StageTimes, simulate
from codescent.cost.walked import Walk
from codescent.plan import AXES, Plan, Schedule
from codescent.plan.line import line_of
from codescent.planner.links import Links
from codescent.planner.prediction import has_common_step
from codescent.report.step_boxes import PictureBox, boxes_of
from codescent.report.step_picture import WIDEST_IN, measured, picture, tracks
from codescent.report.style import PICTURES, no_matplotlib
from codescent.verbs.picture import may_replace, no_file

USUAL = Lengths()

TOY = "; with it no computing could be seen: --flops-per-byte N draws it"
"""Of a toy: why sending takes no time."""
LEAST_COMPUTING = 0.02
"""A step in which less of the time is computed is that of a toy."""
MANY = "; the ranks are too many for a row each"
MOST_WALKED = 64
"""Of more ranks the walk takes long, and a picture would show a few of them."""
MOST_RANKS, MOST_OUTSIDE = 16, 4
"""Rows of a picture: ranks of the mesh, and others."""
TRACE_US = 1000.0  # length of a unit in the trace: a millisecond
UNITS_PER_S = 1000.0  # of the timeline of ranks: milliseconds
DRAWN_STEPS = 8
"""Most steps in a picture of ranks, unless a round is longer: of more nothing could be read."""
RANKS_IN = 12.0
"""Width of a picture of ranks, in inches: their steps differ too much in length for one width of a unit."""


def refusals(path: Path) -> Iterator[str]:
    """Yield why a timeline cannot be written to `path`."""
    suffix = path.suffix.lower()
    if problem := no_file("--timeline", path):
        yield problem
    elif suffix not in (*PICTURES, ".json"):
        yield f"--timeline {path}: the name must end in .png or .svg (a picture) or .json (a trace for ui.perfetto.dev)"
    elif suffix == ".json" and not may_replace(path, '"traceEvents"'):
        yield f"--timeline {path}: this file is not a timeline, and would be lost; give another name"
    elif suffix in PICTURES and (problem := no_matplotlib(", or write a .json trace")):
        yield f"--timeline {path}: {problem}"


def draw_plan(plan: Plan, path: Path, flops_per_byte: float | None = None) -> str:
    """Draw one step of a plan: see `write_timeline`. Returns a sentence that says what was written.

    Of a round it is the last step. Where ranks differ, or gather each other's weights, each has a row and there are
    several steps (`draw_ranks`). `flops_per_byte`: None: FLOPS_PER_BYTE; but of a toy, whose computing could not be
    seen beside its communication, sending takes no time then.
    """
    if problems := list(refusals(path)):
        raise UserError(*problems)
    has_ranks, title, steady = _has_rows_of_ranks(plan), _title(plan), phases(plan)[-1]
    if not has_ranks:
        plan = one_step(plan, steady.round_begins + steady.period - 1)
    usual = FLOPS_PER_BYTE if flops_per_byte is None else flops_per_byte
    given, may_be_toy = _given(plan, usual), flops_per_byte is None
    if has_ranks:
        walk = _in_units_of(plan, given, usual)
        if may_be_toy and walk.computes < LEAST_COMPUTING:
            given = _given(plan, 0.0, is_toy=True)
            walk = _in_units_of(plan, given, 0.0)
        return draw_ranks(plan, path, walk, given)
    is_toy = may_be_toy and _is_toy(plan, given)
    given = _given(plan, 0.0, is_toy=True) if is_toy else given
    simulation = write_timeline(plan.schedule, title, path, given, line_of(plan))
    which = f"the last of {steady.period} steps" if steady.period > 1 else "one step"
    many = MANY if plan.mesh.world_size > MOST_WALKED and plan.mesh.pp == 1 else ""
    return f"{path}: {which} of {title}: {measured(simulation)}{TOY if is_toy else ''}{many}"


def _is_toy(plan: Plan, given: Lengths) -> bool:
    """Whether so little is computed that nobody would see it beside the communication."""
    found = simulate(plan.computing, given.costs, waits=given.waits)
    return found.ideal_s < LEAST_COMPUTING * found.makespan_s


def _given(plan: Plan, flops_per_byte: float, *, is_toy: bool = False) -> Lengths:
    """The lengths of a step's instructions, and what sending takes, in words."""
    given = lengths(plan, flops_per_byte)
    sending = (
        f"sending a byte takes as long as {flops_per_byte:,g} FLOPs" if flops_per_byte else "sending takes no time"
    )
    return dataclasses.replace(given, unit=f"{given.unit}; {sending}{TOY if is_toy else ''}")


def _has_rows_of_ranks(plan: Plan) -> bool:
    """Whether ranks do different things, or hold parts of the weights, and no stages are to be seen."""
    mesh, layout = plan.mesh, plan.layout
    if mesh.pp > 1 or plan.schedule.period > DRAWN_STEPS or plan.world_size > MOST_WALKED:
        return False  # of a long round the last step says more
    return not has_common_step(plan) or layout.gossip != "none" or (mesh.dp_shard > 1 and layout.zero_stage > 0)


def _in_units_of(plan: Plan, given: Lengths, flops_per_byte: float) -> Walk:
    """The ranks of a plan on equal links, in units of a forward pass."""
    link = Link(given.unit_flops / flops_per_byte) if flops_per_byte else AT_ONCE
    units = max(stage.busy_s for stage in simulate(plan.computing, given.costs).stages)
    return Links(of_links(link, inside=link), None, units, None, {}).walk(plan, Coding(), timeline=True)


def draw_ranks(plan: Plan, path: Path, walk: Walk, given: Lengths | None = None) -> str:
    """Draw the measured rounds of a walk, a row for each rank. Returns a sentence that says what was written.

    A unit is a millisecond, or that of `given`. Lanes below the rows have what the ranks' network cards send. A picture
    has the first steps and ranks alone, a trace (.json) has all.
    """
    if problems := list(refusals(path)):
        raise UserError(*problems)
    is_picture = path.suffix.lower() in PICTURES
    end = max((span.end_s for span in walk.timeline), default=0.0)
    all_steps = steps = max(1, round(end / walk.step_s)) if walk.step_s else 1
    most = max(DRAWN_STEPS, plan.schedule.period)
    if is_picture and steps > most:
        steps, end = most, most * walk.step_s
    simulation = of_walk(plan, walk, end, steps)
    if is_picture:
        simulation = _first_rows(simulation, plan)
    drawn = counted(steps, "step") if steps == all_steps else f"the first {steps} of {all_steps} steps,"
    each = " each" if steps > 1 else ""
    rows = f"; the first {MOST_RANKS} ranks" if is_picture and plan.mesh.world_size > MOST_RANKS else ""
    if given is None:
        simulation, given, widest_in = _in_milliseconds(simulation), Lengths(unit="a millisecond"), RANKS_IN
        said = f"{drawn} of {of_seconds(walk.step_s)}{each}; {of_number(walk.tokens_per_s)} tokens/s{rows}"
    else:  # collectives of a walk are its flights
        given, widest_in = dataclasses.replace(given, exchanges={}), WIDEST_IN if steps == 1 else RANKS_IN
        computes = sum(rank.busy_s for rank in walk.ranks) / len(walk.ranks) / (walk.step_s or 1.0)
        said = f"{drawn} of {walk.step_s:.4g} units{each}; ranks compute in {computes:.1%} of the time{rows}"
    title = _title(plan)
    _write(simulation, title, path, given, said, widest_in, line_of(plan))
    return f"{path}: {title}: {said}{TOY if TOY in given.unit else ''}"


def of_walk(plan: Plan, walk: Walk, end_s: float, steps: int) -> Simulation:
    """What the ranks of a walk do before `end_s`, which is after so many steps."""
    ranks = [
        StageTimes(rank.busy_s * steps, 0.0, rank.waits_s * steps, 0.0, plan.schedule.most_in_flight(plan.role(number)))
        for number, rank in enumerate(walk.ranks)
    ]
    outside = range(plan.mesh.world_size, plan.world_size)
    ranks += [StageTimes(0.0, 0.0, end_s, 0.0, 0) for _ in outside]
    last_s = max((span.end_s for span in walk.timeline), default=0.0)
    window = Window(0.0, end_s if end_s < last_s else math.inf)  # what takes no time at the end is in it, too
    names = *(f"rank {number}" for number in range(plan.mesh.world_size)), *(f"server {number}" for number in outside)
    found = (window.cut(walk.timeline), window.cut(walk.flights))
    return Simulation(end_s, tuple(ranks), *found, "rank", window.cut(walk.activities), names)


def _first_rows(simulation: Simulation, plan: Plan) -> Simulation:
    """The first ranks of the mesh, and of the others: of more nothing could be read."""
    outside = range(plan.mesh.world_size, plan.world_size)
    shown = [*range(min(MOST_RANKS, plan.mesh.world_size)), *outside[:MOST_OUTSIDE]]
    if len(shown) == len(simulation.stages):
        return simulation
    row = {number: at for at, number in enumerate(shown)}

    def kept(found: Any) -> Any:
        return tuple(dataclasses.replace(at, stage=row[at.stage]) for at in found if at.stage in row)

    return dataclasses.replace(
        simulation,
        stages=tuple(simulation.stages[number] for number in shown),
        names=tuple(simulation.name(number) for number in shown),
        timeline=kept(simulation.timeline),
        messages=kept(simulation.messages),
        activities=kept(simulation.activities),
    )


def draw_price(found: Price, path: Path) -> str:
    """Draw the step that was priced, a row for each stage. Returns a sentence that says what was written.

    A unit is a millisecond. What a stage waits for are collectives that no computation hides.
    """
    if problems := list(refusals(path)):
        raise UserError(*problems)
    simulation, title = _in_milliseconds(found.simulate()), f"{_title(found.plan)}, on {found.cluster.name}"
    said = f"a step of {of_seconds(found.step_s)}; {of_number(found.tokens_per_s)} tokens/s"
    config = f"{line_of(found.plan)}; on {found.cluster.name}"
    _write(simulation, title, path, Lengths(unit="a millisecond"), said, RANKS_IN, config)
    return f"{path}: {title}: {said}"


def _in_milliseconds(simulation: Simulation) -> Simulation:
    """A simulation in seconds, in milliseconds."""

    def scaled(one: Any, *names: str) -> Any:
        return dataclasses.replace(one, **{name: getattr(one, name) * UNITS_PER_S for name in names})

    return dataclasses.replace(
        simulation,
        makespan_s=simulation.makespan_s * UNITS_PER_S,
        stages=tuple(scaled(at, "busy_s", "data_wait_s", "comm_wait_s", "idle_end_s") for at in simulation.stages),
        timeline=tuple(scaled(at, "start_s", "end_s", "waits_s") for at in simulation.timeline),
        messages=tuple(scaled(at, "start_s", "end_s") for at in simulation.messages),
        activities=tuple(scaled(at, "start_s", "end_s") for at in simulation.activities),
    )


def _title(plan: Plan) -> str:
    """The model's kind, the schedule, the mesh axes with several ranks, and how replicas meet."""
    mesh, layout, count = plan.mesh, plan.layout, plan.work.num_microbatches
    chunks = f" with {layout.virtual_stages} chunks per stage" if layout.virtual_stages > 1 else ""
    schedule = f"{layout.schedule}{chunks}, {mesh.pp} stages" if mesh.pp > 1 else "one stage, no pipeline"
    others = [f"{axis} {mesh.degree(axis)}" for axis in AXES if axis != "pp" and mesh.degree(axis) > 1]
    sharded = [f"zero_stage {layout.zero_stage}"] if mesh.dp_shard > 1 else []
    meets = [f"average_every {layout.average_every}"] if layout.average_every else []
    meets += [f"gossip {layout.gossip} every {layout.gossip_every}"] if layout.gossip != "none" else []
    meets += [f"servers {layout.servers}, {layout.updates}"] if layout.served else []
    meets += [f"wire {layout.wire}"] if layout.wire != "none" else []
    microbatches = f"{count} micro-batch{'' if count == 1 else 'es'}"
    return f"{plan.model.kind}, {', '.join([schedule, microbatches, *others, *sharded, *meets])}"


def write_timeline(schedule: Schedule, title: str, path: Path, given: Lengths = USUAL, config: str = "") -> Simulation:
    """Draw one step of `schedule` with relative lengths to a .png, .svg or .json file. The file appears complete.

    `config`: what is simulated, in a line of a picture.

    Raises UserError: see `refusals`, or the file cannot be written.
    """
    if problems := list(refusals(path)):
        raise UserError(*problems)
    simulation = simulate(schedule, given.costs, waits=given.waits)
    _write(simulation, title, path, given, config=config)
    return simulation


def _write(
    simulation: Simulation,
    title: str,
    path: Path,
    given: Lengths,
    said: str = "",
    widest_in: float = WIDEST_IN,
    config: str = "",
) -> None:
    """Write a picture or a trace. `config`: what is simulated, in a line of a picture."""
    if path.suffix.lower() == ".json":
        content: str | bytes = json.dumps(trace(simulation, title, given), indent=1) + "\n"
    else:
        content = picture(simulation, title, given, path.suffix.lower(), said, widest_in, config)
    try:
        replace_file(path, content)
    except OSError as error:
        raise UserError(f"--timeline {path}: cannot be written: {error.strerror}") from error


def trace(simulation: Simulation, title: str, given: Lengths) -> dict[str, Any]:
    """The simulation in the Trace Event Format of Chrome and Perfetto: a track for each stage, a slice per instruction.

    Instructions that take no time are instants. A unit is one millisecond. If there are collectives or messages, each
    stage has a track for them too.
    """
    stages = len(simulation.stages)
    lanes = tracks(boxes_of(simulation, given.exchanges))
    names = ["", *lanes]
    events: list[dict[str, Any]] = [{"ph": "M", "pid": 0, "name": "process_name", "args": {"name": title}}]
    for number, name in enumerate(names):
        for stage in range(stages):
            track = {"ph": "M", "pid": 0, "tid": number * stages + stage}
            events.append(
                {**track, "name": "thread_name", "args": {"name": f"{simulation.name(stage)} {name}".rstrip()}}
            )
            events.append({**track, "name": "thread_sort_index", "args": {"sort_index": stage * len(names) + number}})
    events += [_event(span) for span in simulation.timeline]
    for number, boxes in enumerate(lanes.values(), start=1):
        events += [_slice(box, number * stages + box.row) for box in boxes]
    facts = {"unit": given.unit, "costs": dataclasses.asdict(given.costs)}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": facts}


def _slice(box: PictureBox, track: int) -> dict[str, Any]:
    """A wait, a service, a collective or a message."""
    name = f"{box.look.name} {box.text}".rstrip()
    event = {"pid": 0, "tid": track, "name": name, "cat": box.look.name, "ts": box.start * TRACE_US}
    duration = (box.end - box.start) * TRACE_US
    return {**event, "ph": "X", "dur": duration} if duration > 0 else {**event, "ph": "i", "s": "t"}


def _event(span: Span) -> dict[str, Any]:
    at = span.instruction
    duration = span.end_s - span.start_s
    kind = {"ph": "X", "dur": duration * TRACE_US} if duration > 0 else {"ph": "i", "s": "t"}
    waits = span.waits_s * TRACE_US or None
    arguments = {"microbatch": at.microbatch, "chunk": at.chunk, "last": at.last, "peer": at.peer, "waits_us": waits}
    event = {"name": str(at), "cat": str(at.verb), "pid": 0, "tid": span.stage, "ts": span.start_s * TRACE_US, **kind}
    return {**event, "args": {name: value for name, value in arguments.items() if value is not None}}
