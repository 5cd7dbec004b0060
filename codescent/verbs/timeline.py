"""In: a plan's schedule, the relative length of each instruction. Out: a file: a picture or a Perfetto trace of a step.
Does not measure: it shows the simulation of cost/simulate.py. Does not draw (report/step_picture.py does)."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from codescent.base.amounts import of_number, of_seconds
from codescent.base.counted import counted
from codescent.base.durable import replace_file
from codescent.base.errors import UserError
from codescent.cost.amounts import one_step, phases
from codescent.cost.lengths import FLOPS_PER_BYTE, Lengths, lengths
from codescent.cost.price import Price
from codescent.cost.simulate import Simulation, Span, StageTimes, simulate
from codescent.cost.walked import Walk
from codescent.plan import AXES, Plan, Schedule
from codescent.plan.line import line_of
from codescent.report.step_picture import WIDEST_IN, communication, measured, picture
from codescent.report.style import PICTURES, no_matplotlib
from codescent.verbs.picture import may_replace, no_file

USUAL = Lengths()

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


def draw_plan(plan: Plan, path: Path, flops_per_byte: float = FLOPS_PER_BYTE) -> str:
    """Draw one step of a plan: see `write_timeline`. Returns a sentence that says what was written.

    Of a round it is the last step; `draw_ranks` draws whole rounds.
    """
    steady = phases(plan)[-1]
    plan = one_step(plan, steady.round_begins + steady.period - 1)
    given = lengths(plan, flops_per_byte)
    as_long = f"sending a byte takes as long as {flops_per_byte:,g} FLOPs"
    sending = as_long if flops_per_byte else "sending takes no time"
    given = dataclasses.replace(given, unit=f"{given.unit}; {sending}")
    title = _title(plan)
    simulation = write_timeline(plan.schedule, title, path, given, line_of(plan))
    which = f"the last of {steady.period} steps" if steady.period > 1 else "one step"
    return f"{path}: {which} of {title}: {measured(simulation)}"


def draw_ranks(plan: Plan, path: Path, walk: Walk) -> str:
    """Draw the measured rounds of a walk, a row for each rank. Returns a sentence that says what was written.

    A unit is a millisecond. Lanes below the rows have what the ranks' network cards send. A picture has the first
    steps alone, a trace (.json) has all.
    """
    if problems := list(refusals(path)):
        raise UserError(*problems)
    makespan_s = max((span.end_s for span in walk.timeline), default=0.0)
    all_steps = steps = max(1, round(makespan_s / walk.step_s)) if walk.step_s else 1
    most = max(DRAWN_STEPS, plan.schedule.period)
    if path.suffix.lower() in PICTURES and steps > most:
        steps, makespan_s = most, most * walk.step_s
        walk = _beginning(walk, makespan_s)
    makespan = makespan_s * UNITS_PER_S
    ranks = [
        StageTimes(
            rank.busy_s * steps * UNITS_PER_S,
            0.0,
            rank.waits_s * steps * UNITS_PER_S,
            0.0,
            plan.schedule.most_in_flight(plan.role(number)),
        )
        for number, rank in enumerate(walk.ranks)
    ]
    ranks += [StageTimes(0.0, 0.0, makespan, 0.0, 0)] * plan.layout.server_ranks
    timeline = tuple(
        dataclasses.replace(
            at, start_s=at.start_s * UNITS_PER_S, end_s=at.end_s * UNITS_PER_S, waits_s=at.waits_s * UNITS_PER_S
        )
        for at in walk.timeline
    )
    flights = tuple(
        dataclasses.replace(at, start_s=at.start_s * UNITS_PER_S, end_s=at.end_s * UNITS_PER_S) for at in walk.flights
    )
    simulation = Simulation(makespan, tuple(ranks), timeline, flights, lane="rank")
    title = _title(plan)
    drawn = counted(steps, "step") if steps == all_steps else f"the first {steps} of {all_steps} steps,"
    said = f"{drawn} of {of_seconds(walk.step_s)} each; {of_number(walk.tokens_per_s)} tokens/s"
    _write(simulation, title, path, Lengths(unit="a millisecond"), said, RANKS_IN, line_of(plan))
    return f"{path}: {title}: {said}"


def draw_price(found: Price, path: Path) -> str:
    """Draw the step that was priced, a row for each stage. Returns a sentence that says what was written.

    A unit is a millisecond. What a stage waits for are collectives that no computation hides.
    """
    if problems := list(refusals(path)):
        raise UserError(*problems)
    simulation, title = _in_units(found.simulate()), f"{_title(found.plan)}, on {found.cluster.name}"
    said = f"a step of {of_seconds(found.step_s)}; {of_number(found.tokens_per_s)} tokens/s"
    config = f"{line_of(found.plan)}; on {found.cluster.name}"
    _write(simulation, title, path, Lengths(unit="a millisecond"), said, RANKS_IN, config)
    return f"{path}: {title}: {said}"


def _in_units(simulation: Simulation) -> Simulation:
    """A simulation in seconds, in units of the trace."""

    def scaled(one: Any, *names: str) -> Any:
        return dataclasses.replace(one, **{name: getattr(one, name) * UNITS_PER_S for name in names})

    return dataclasses.replace(
        simulation,
        makespan_s=simulation.makespan_s * UNITS_PER_S,
        stages=tuple(scaled(at, "busy_s", "data_wait_s", "comm_wait_s", "idle_end_s") for at in simulation.stages),
        timeline=tuple(scaled(at, "start_s", "end_s", "waits_s") for at in simulation.timeline),
        messages=tuple(scaled(at, "start_s", "end_s") for at in simulation.messages),
    )


def _beginning(walk: Walk, end_s: float) -> Walk:
    """What a walk does before `end_s`."""

    def cut(at: Span) -> Span:  # the wait is the last part of a span
        late_s = max(0.0, at.end_s - end_s)
        return dataclasses.replace(at, end_s=at.end_s - late_s, waits_s=max(0.0, at.waits_s - late_s))

    timeline = tuple(cut(at) for at in walk.timeline if at.start_s < end_s)
    flying = (at for at in walk.flights if at.start_s < end_s)
    flights = tuple(dataclasses.replace(at, end_s=min(at.end_s, end_s)) for at in flying)
    return dataclasses.replace(walk, timeline=timeline, flights=flights)


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
    lanes = {name: list(slices) for name, slices in communication(simulation, given.exchanges).items()}
    tracks = ["", *(name for name, slices in lanes.items() if slices)]
    events: list[dict[str, Any]] = [{"ph": "M", "pid": 0, "name": "process_name", "args": {"name": title}}]
    for number, name in enumerate(tracks):
        for stage in range(stages):
            track = {"ph": "M", "pid": 0, "tid": number * stages + stage}
            events.append(
                {**track, "name": "thread_name", "args": {"name": f"{simulation.lane} {stage} {name}".rstrip()}}
            )
            events.append({**track, "name": "thread_sort_index", "args": {"sort_index": stage * len(tracks) + number}})
    events += [_event(span) for span in simulation.timeline]
    for number, name in enumerate(tracks[1:], start=1):
        for stage, start, duration in lanes[name]:
            track = {"ph": "X", "pid": 0, "tid": number * stages + stage, "name": name, "cat": name}
            events.append({**track, "ts": start * TRACE_US, "dur": duration * TRACE_US})
    facts = {"unit": given.unit, "costs": dataclasses.asdict(given.costs)}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": facts}


def _event(span: Span) -> dict[str, Any]:
    at = span.instruction
    duration = span.end_s - span.start_s
    kind = {"ph": "X", "dur": duration * TRACE_US} if duration > 0 else {"ph": "i", "s": "t"}
    waits = span.waits_s * TRACE_US or None
    arguments = {"microbatch": at.microbatch, "chunk": at.chunk, "last": at.last, "peer": at.peer, "waits_us": waits}
    event = {"name": str(at), "cat": str(at.verb), "pid": 0, "tid": span.stage, "ts": span.start_s * TRACE_US, **kind}
    return {**event, "args": {name: value for name, value in arguments.items() if value is not None}}
