"""In: a plan's schedule, the relative length of each instruction. Out: a file: a picture or a Perfetto trace of a step.
Does not measure: it shows the simulation of cost/simulate.py. Does not draw (report/step_picture.py does)."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from codescent.base.amounts import of_number, of_seconds
from codescent.base.counted import counted
from codescent.base.durable import replace_file
from codescent.base.errors import UserError
from codescent.clusters.by_links import of_links
from codescent.clusters.link import AT_ONCE, Link
from codescent.cost.amounts import one_step, phases
from codescent.cost.coding import Coding
from codescent.cost.doing import Timespan, Window
from codescent.cost.lengths import FLOPS_PER_BYTE, Lengths, lengths
from codescent.cost.price import Price
from codescent.cost.simulate import Simulation, Span, StageTimes, simulate
from codescent.cost.walked import Walk
from codescent.plan import AXES, Plan, Schedule
from codescent.plan.line import line_of
from codescent.planner.links import Links
from codescent.planner.prediction import has_common_step
from codescent.report.step_boxes import PictureBox, boxes_of
from codescent.report.step_picture import WIDEST_IN, measured, sheet, tracks
from codescent.report.style import PICTURES, marked, no_matplotlib, picture_bytes
from codescent.verbs.picture import no_file, no_replacement

MARK = "codescent plan"
"""Stands in every file of this command, which replaces only such files."""
USUAL = Lengths()

TOY = "; sending takes no time: at the usual speed of links no computing could be seen; --flops-per-byte N sets a speed"
"""Of a toy."""
LEAST_COMPUTING = 0.02
"""A step in which less of the time is computed is that of a toy."""
LEAST_DRAWN = 0.001
"""If less of the time is computed, a picture shows a line of it at most."""
SLOWEST = 1e12
"""FLOPs for a byte with which a step can still be simulated. It is beyond what can be drawn."""
MANY = "; the ranks are too many for a row each"
LONG = "; a round is too long for a row for each rank"
MOST_WALKED = 64
"""Of more ranks the walk takes long, and a picture would show a few of them."""
MOST_RANKS, MOST_OUTSIDE = 16, 4
"""Rows of a picture: ranks of the mesh, and others."""
NO_ROW = -1
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
    elif problem := no_replacement(path, MARK, "plan --timeline") or _no_drawing(suffix):
        yield f"--timeline {path}: {problem}"


def _no_drawing(suffix: str) -> str:
    """Why no picture can be drawn, if the suffix is that of one; "": nothing is missing."""
    return no_matplotlib(", or write a .json trace") if suffix in PICTURES else ""


class RelativeStep(NamedTuple):
    """A step at a speed of links.

    Attributes:
        given: the lengths of its instructions.
        computes: the share of the time in which the busiest rank computes.
        walk: of the ranks; None: each stage has a row.
        is_toy: whether sending takes no time, because nobody would see what is computed.
    """

    given: Lengths
    computes: float
    walk: Walk | None
    is_toy: bool = False


def draw_plan(plan: Plan, path: Path, flops_per_byte: float | None = None) -> str:
    """Draw one step of a plan: see `write_timeline`. Returns a sentence that says what was written.

    Of a round it is the last step. Where ranks differ, or gather each other's weights, each has a row and there are
    several steps (`draw_ranks`). `flops_per_byte`: None: FLOPS_PER_BYTE; but of a toy, whose computing could not be
    seen beside its communication, sending takes no time then.
    """
    _refuse(path)
    no_rows, title, steady = _why_no_rows(plan), _title(plan), phases(plan)[-1]
    if no_rows is not None:
        plan = one_step(plan, steady.round_begins + steady.period - 1)
    found = _relative_step(plan, flops_per_byte, of_ranks=no_rows is None)
    toy = TOY if found.is_toy else ""
    if found.walk is not None:
        return _draw_ranks(plan, path, found.walk, found.given) + toy
    simulation = _simulated(plan.schedule, found.given)
    _write(simulation, title, path, found.given, config=line_of(plan))
    which = f"the last of {steady.period} steps" if steady.period > 1 else "one step"
    return f"{path}: {which} of {title}: {measured(simulation)}{toy}{no_rows}"


def _refuse(path: Path) -> None:
    """Raise UserError if a timeline cannot be written to `path`."""
    if problems := list(refusals(path)):
        raise UserError(*problems)


def _relative_step(plan: Plan, flops_per_byte: float | None, *, of_ranks: bool) -> RelativeStep:
    """The step that is drawn. Raises UserError: with so slow links nobody would see what is computed."""
    if flops_per_byte is None:
        found = _at_speed(plan, FLOPS_PER_BYTE, of_ranks=of_ranks)
        if found.computes >= LEAST_COMPUTING:
            return found
        found = _at_speed(plan, 0.0, of_ranks=of_ranks)
        return found._replace(given=dataclasses.replace(found.given, unit=f"{found.given.unit}{TOY}"), is_toy=True)
    found = _at_speed(plan, speed := min(flops_per_byte, SLOWEST), of_ranks=of_ranks)
    if found.computes >= LEAST_DRAWN:
        return found
    most = speed * (1 / LEAST_DRAWN - 1) / (1 / found.computes - 1)
    digit = 10.0 ** math.floor(math.log10(most))
    raise UserError(
        f"--flops-per-byte {flops_per_byte:g}: less than {LEAST_DRAWN:.1%} of the step would be computed, which no "
        f"picture shows; give at most {most // digit * digit:.15g}"
    )


def _at_speed(plan: Plan, flops_per_byte: float, *, of_ranks: bool) -> RelativeStep:
    """The step on links of a speed. `of_ranks`: whether each rank is simulated."""
    given = _given(plan, flops_per_byte)
    if of_ranks:
        walk = _in_units_of(plan, given, flops_per_byte)
        return RelativeStep(given, walk.computes, walk)
    found = _simulated(plan.computing, given)
    return RelativeStep(given, found.ideal_s / found.makespan_s, None)


def _simulated(schedule: Schedule, given: Lengths) -> Simulation:
    return simulate(schedule, given.costs, waits=given.waits)


def _given(plan: Plan, flops_per_byte: float) -> Lengths:
    """The lengths of a step's instructions, and what sending takes, in words."""
    given = lengths(plan, flops_per_byte)
    sending = f"; sending a byte takes as long as {flops_per_byte:,g} FLOPs" if flops_per_byte else ""
    return dataclasses.replace(given, unit=given.unit + sending)


def _why_no_rows(plan: Plan) -> str | None:
    """Why ranks have no rows of their own, in words; "": those of a stage do the same. None: each rank has a row."""
    mesh, layout = plan.mesh, plan.layout
    is_sharded = mesh.dp_shard > 1 and layout.zero_stage > 0
    if mesh.pp > 1 or (has_common_step(plan) and layout.gossip == "none" and not is_sharded):
        return ""
    if plan.schedule.period > DRAWN_STEPS:
        return LONG  # the last step says more
    return MANY if plan.world_size > MOST_WALKED else None


def _in_units_of(plan: Plan, given: Lengths, flops_per_byte: float) -> Walk:
    """The ranks of a plan on equal links, in units of a forward pass."""
    link = Link(given.unit_flops / flops_per_byte) if flops_per_byte else AT_ONCE
    units = max(stage.busy_s for stage in simulate(plan.computing, given.costs).stages)
    return Links(of_links(link, inside=link), None, units, None, {}).walk(plan, Coding(), timeline=True)


def draw_ranks(plan: Plan, path: Path, walk: Walk) -> str:
    """Draw the measured rounds of a walk, a row for each rank. Returns a sentence that says what was written.

    A unit is a millisecond. Lanes below the rows have what the ranks' network cards send. A picture has the first steps
    and ranks alone, a trace (.json) has all.
    """
    _refuse(path)
    return _draw_ranks(plan, path, walk)


def _draw_ranks(plan: Plan, path: Path, walk: Walk, given: Lengths | None = None) -> str:
    """See `draw_ranks`. `given`: has the unit of the walk's times; None: they are in seconds."""
    is_picture = path.suffix.lower() in PICTURES
    computed = max((span.end_s for span in walk.timeline), default=0.0)
    all_steps = steps = max(1, round(computed / walk.step_s)) if walk.step_s else 1
    end, most = _end_s(walk), max(DRAWN_STEPS, plan.schedule.period)
    if is_picture and steps > most:
        steps, end = most, most * walk.step_s
    simulation = of_walk(plan, walk, end, steps)
    if is_picture:
        simulation = _first_rows(simulation, plan)
    drawn = counted(steps, "step") if steps == all_steps else f"the first {steps} of {all_steps} steps,"
    each = " each" if steps > 1 else ""
    rows = _left_out(plan) if is_picture else ""
    if given is None:
        simulation, given, widest_in = _in_milliseconds(simulation), Lengths(unit="a millisecond"), RANKS_IN
        said = f"{drawn} of {of_seconds(walk.step_s)}{each}; {of_number(walk.tokens_per_s)} tokens/s{rows}"
    else:  # collectives of a walk are its flights
        given, widest_in = dataclasses.replace(given, exchanges={}), WIDEST_IN if steps == 1 else RANKS_IN
        computes = sum(rank.busy_s for rank in walk.ranks) / len(walk.ranks) / (walk.step_s or 1.0)
        said = f"{drawn} of {walk.step_s:.4g} units{each}; ranks compute in {computes:.1%} of the time{rows}"
    title = _title(plan)
    _write(simulation, title, path, given, said, widest_in, line_of(plan))
    return f"{path}: {title}: {said}"


def _end_s(walk: Walk) -> float:
    """When the last of what is simulated ends: a rank may wait after its last instruction."""
    found: tuple[Timespan, ...] = (*walk.timeline, *walk.flights, *walk.activities)
    return max((one.end_s for one in found), default=0.0)


def of_walk(plan: Plan, walk: Walk, end_s: float, steps: int) -> Simulation:
    """What the ranks of a walk do before `end_s`, which is after so many steps."""
    ranks = [
        StageTimes(rank.busy_s * steps, 0.0, rank.waits_s * steps, 0.0, plan.schedule.most_in_flight(plan.role(number)))
        for number, rank in enumerate(walk.ranks)
    ]
    outside = _outside(plan)
    ranks += [StageTimes(0.0, 0.0, end_s, 0.0, 0) for _ in outside]
    window = Window(0.0, end_s if end_s < _end_s(walk) else math.inf)  # what takes no time at the end is in it, too
    names = (
        *(f"rank {number}" for number in range(plan.mesh.world_size)),
        *(f"server {at}" for at in range(len(outside))),
    )
    found = (window.cut(walk.timeline), window.cut(walk.flights))
    return Simulation(end_s, tuple(ranks), *found, "rank", window.cut(walk.activities), names)


def _outside(plan: Plan) -> range:
    """The ranks outside of the mesh: they only serve."""
    return range(plan.mesh.world_size, plan.world_size)


def _left_out(plan: Plan) -> str:
    """The rows that a picture has of many, in words."""
    ranks, servers = plan.mesh.world_size, len(_outside(plan))
    said = f"; the first {MOST_RANKS} of {ranks} ranks" if ranks > MOST_RANKS else ""
    return said + (f"; the first {MOST_OUTSIDE} of {servers} servers" if servers > MOST_OUTSIDE else "")


def _first_rows(simulation: Simulation, plan: Plan) -> Simulation:
    """The first ranks of the mesh, and of the others: of more nothing could be read.

    A message to a rank without a row has the peer NO_ROW.
    """
    shown = [*range(min(MOST_RANKS, plan.mesh.world_size)), *_outside(plan)[:MOST_OUTSIDE]]
    if len(shown) == len(simulation.stages):
        return simulation
    row = {number: at for at, number in enumerate(shown)}

    def kept(found: Any) -> Any:
        return tuple(dataclasses.replace(at, stage=row[at.stage]) for at in found if at.stage in row)

    messages = (dataclasses.replace(at, peer=row.get(at.peer, NO_ROW)) for at in simulation.messages)
    return dataclasses.replace(
        simulation,
        stages=tuple(simulation.stages[number] for number in shown),
        names=tuple(simulation.name(number) for number in shown),
        timeline=kept(simulation.timeline),
        messages=kept(messages),
        activities=kept(simulation.activities),
    )


def draw_price(found: Price, path: Path) -> str:
    """Draw the step that was priced, a row for each stage. Returns a sentence that says what was written.

    A unit is a millisecond. What a stage waits for are collectives that no computation hides.
    """
    _refuse(path)
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
    _refuse(path)
    simulation = _simulated(schedule, given)
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
    """Write a picture or a trace. `said`, `widest_in` and `config`: see `sheet`."""
    suffix = path.suffix.lower()
    if suffix == ".json":
        content: str | bytes = json.dumps(trace(simulation, title, given), indent=1) + "\n"
    else:
        figure = sheet(simulation, title, given, said, widest_in, config)
        content = picture_bytes(figure, suffix, marked(suffix, MARK))
    try:
        replace_file(path, content)
    except OSError as error:
        raise UserError(f"--timeline {path}: cannot be written: {error.strerror}") from error


def trace(simulation: Simulation, title: str, given: Lengths) -> dict[str, Any]:
    """The simulation in the Trace Event Format of Chrome and Perfetto: a track for each stage, a slice per instruction.

    Instructions that take no time are instants. A unit is one millisecond. Waits, collectives, messages and what a
    server does have tracks below that of the instructions. What overlaps has several.
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
    facts = {"written_by": MARK, "unit": given.unit, "costs": dataclasses.asdict(given.costs)}
    return {"otherData": facts, "displayTimeUnit": "ms", "traceEvents": events}


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
