"""In: a run's plan, the measured seconds of its ranks. Out: one step as boxes of rank x time, computed or measured.
Does not draw, and does not know when an instruction began: a run folder has seconds of a step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from codescent.base.amounts import of_bytes, of_seconds
from codescent.cost.bubble import SPLIT
from codescent.cost.doing import Doing
from codescent.cost.lengths import instructions_of, lengths
from codescent.cost.simulate import Costs, Seconds, Simulation, Waits, simulate
from codescent.plan import Instruction, Plan, Schedule, Traffic, Verb
from codescent.results import Parts

OTHER = "other"
"""A kind of boxes beside those of `Verb` and `Doing`."""


@dataclass(frozen=True)
class StepBox:
    """What a rank does for some time.

    Attributes:
        kind: the name of a Verb or of a wait (`Doing`), or OTHER.
        start_s, length_s: from the begin of the step.
        what: the operation, its time and its bytes, in words.
        number: of the micro-batch; None: it has none.
    """

    rank: int
    kind: str
    start_s: float
    length_s: float
    what: str
    number: int | None = None


@dataclass(frozen=True)
class StepTimeline:
    """One step of a run on its ranks. `source`: where its numbers come from, in a sentence."""

    title: str
    source: str
    step_s: float
    ranks: Sequence[int]
    boxes: Sequence[StepBox]


def computed(plan: Plan, compute_s: float) -> StepTimeline:
    """The step that the plan gives if all ranks are equally fast and messages take no time.

    Args:
        plan: of the run.
        compute_s: seconds of forward and backward passes, the mean over ranks; they set the scale.
    """
    costs = lengths(plan).costs
    stages = simulate(plan.computing, _scaled(costs, 1.0)).stages
    scale = compute_s / (sum(stage.busy_s for stage in stages) / len(stages))
    simulation = simulate(plan.computing, _scaled(costs, scale))
    ranks = plan.mesh.group("pp", 0)
    boxes = _boxes(simulation, plan, ranks, [0.0] * len(ranks))
    source = (
        "Computed from the Plan: its instruction lists and FLOPs, if all ranks are as fast as their mean and messages "
        "take no time."
    )
    return StepTimeline("computed from the Plan", source, simulation.makespan_s, ranks, boxes)


def measured(plan: Plan, parts: Sequence[Parts]) -> StepTimeline:
    """The step with the measured seconds of each rank, its instructions in the order of the plan.

    A rank's passes are equally long. Where the plan has collectives for which a rank waits between its passes, its
    waiting is there, in proportion to their bytes. Else it is before the sums over all ranks: first for the last rank
    that computes, then in the collective.

    Args:
        plan: of the run.
        parts: of all ranks, in order.
    """
    groups = plan.mesh.groups("pp")
    between = _between(plan)
    costs = [_measured_costs(plan.computing, [parts[rank] for rank in ranks]) for ranks in groups]
    walked = [simulate(plan.computing, replace(given, step_s=0.0, reduce_s=0.0)) for given in costs]
    last_s = max(simulation.makespan_s for simulation in walked)
    boxes: list[StepBox] = []
    for ranks, given, simulation in zip(groups, costs, walked, strict=True):
        own = [parts[rank] for rank in ranks]
        waits: Waits = {at: own[at[0]].communication_s * share for at, share in between.items()}
        idle = [0.0] * len(ranks)
        if not between:
            computed_s = [simulation.makespan_s - stage.idle_end_s for stage in simulation.stages]
            ends = [max(last_s, one.step_s - one.optimizer_s - one.other_s) for one in own]
            idle = [last_s - at for at in computed_s]
            waits = {at: ends[at[0]] - computed_s[at[0]] for at in _reduces(plan.computing)}
        found = _boxes(simulate(plan.computing, given, waits=waits), plan, ranks, idle)
        boxes += found
        for rank, one in zip(ranks, own, strict=True):
            if one.other_s > 0:
                end = max((box.start_s + box.length_s for box in found if box.rank == rank), default=0.0)
                boxes.append(StepBox(rank, OTHER, end, one.other_s, f"rank {rank}: the rest, {when(end, one.other_s)}"))
    source = (
        "Measured: the means of each rank's seconds in ranks.csv, in the order of its instruction list. When each "
        "instruction began was not measured."
    )
    end = max((box.start_s + box.length_s for box in boxes), default=0.0)
    return StepTimeline("measured", source, end, range(plan.mesh.world_size), boxes)


def _scaled(costs: Costs, scale: float) -> Costs:
    """The costs of computing, in seconds; nothing else takes time."""

    def times(seconds: Seconds) -> Seconds:
        return tuple(scale * one for one in seconds) if isinstance(seconds, tuple) else scale * seconds

    return Costs(
        forward_s=times(costs.forward_s),
        backward_s=times(costs.backward_s),
        backward_input_s=times(costs.backward_input_s),
        backward_weight_s=times(costs.backward_weight_s),
    )


def _measured_costs(schedule: Schedule, parts: Sequence[Parts]) -> Costs:
    """The seconds of each instruction: a part divided by the number of its instructions, by virtual stage."""
    chunks = 1 + max(at.chunk for program in schedule.programs for at in program)

    def each(name: str, *verbs: Verb) -> tuple[float, ...]:
        counts = [Counter(at.verb for at in program) for program in schedule.programs]
        return tuple(getattr(one, name) / max(1, sum(count[v] for v in verbs)) for one, count in zip(parts, counts))

    backward = each("backward_s", Verb.BACKWARD, *SPLIT) * chunks
    return Costs(
        forward_s=each("forward_s", Verb.FORWARD) * chunks,
        backward_s=backward,
        backward_input_s=backward,
        backward_weight_s=backward,
        load_s=each("data_s", Verb.LOAD) * chunks,
        step_s=each("optimizer_s", Verb.STEP),
    )


def _reduces(schedule: Schedule) -> list[tuple[int, Instruction]]:
    """The instruction of each stage in which all ranks meet."""
    programs = enumerate(schedule.programs)
    return [(stage, next(at for at in program if at.verb is Verb.REDUCE)) for stage, program in programs]


def _between(plan: Plan) -> Mapping[tuple[int, Instruction], float]:
    """The share of the waiting at each instruction, by the bytes of the plan; empty if ranks only wait at the end.

    Empty for a pipeline, too: there the waiting between passes is that for other stages.
    """
    waits = {} if plan.mesh.pp > 1 else {at: wait for at, wait in lengths(plan).waits.items() if at[0] == 0}
    whole = sum(waits.values())
    if not any(share for (_, at), share in waits.items() if at.verb is not Verb.REDUCE):
        return {}
    return {at: share / whole for at, share in waits.items()}


def _boxes(simulation: Simulation, plan: Plan, ranks: Sequence[int], idle: Sequence[float]) -> list[StepBox]:
    """A box for each instruction that takes time, and one for each wait.

    `idle`: by stage: how long it waits for another rank before its sums.
    """
    boxes: list[StepBox] = []
    sent = sends(plan)
    for span in simulation.timeline:
        at, rank = span.instruction, ranks[span.stage]
        computing_s = span.end_s - span.start_s - span.waits_s
        idle_s = idle[span.stage] if at.verb is Verb.REDUCE else 0.0
        waits_s = span.waits_s - idle_s
        bytes_said = sent.get((span.stage, at), "")
        name = str(at).replace("_", " ")
        if computing_s > 1e-9:
            what = f"rank {rank}: {name}, {when(span.start_s, computing_s)}{bytes_said}"
            boxes.append(StepBox(rank, at.verb, span.start_s, computing_s, what, at.microbatch))
        if idle_s > 1e-9:
            boxes.append(_other_rank(rank, span.end_s - span.waits_s, idle_s))
        if waits_s > 1e-9:
            begin = span.end_s - waits_s
            what = f"rank {rank}: in a collective after {name}, {when(begin, waits_s)}{bytes_said}"
            boxes.append(StepBox(rank, Doing.COLLECTIVE, begin, waits_s, what))
    bubbles = (at for at in simulation.activities if at.doing is Doing.RANK)
    return boxes + [_other_rank(ranks[at.stage], at.start_s, at.end_s - at.start_s) for at in bubbles]


def _other_rank(rank: int, start_s: float, length_s: float) -> StepBox:
    what = f"rank {rank}: waits for another rank, {when(start_s, length_s)}"
    return StepBox(rank, Doing.RANK, start_s, length_s, what)


def when(start_s: float, length_s: float) -> str:
    """Begin, end and length of a box, in words."""
    return f"{of_seconds(start_s)} to {of_seconds(start_s + length_s)} ({of_seconds(length_s)})"


def sends(plan: Plan) -> Mapping[tuple[int, Instruction], str]:
    """What each instruction of a stage sends, in words with the bytes of one rank. Others are absent."""
    return {at: _said(records, plan) for at, records in _sent(plan).items()}


def _sent(plan: Plan) -> Mapping[tuple[int, Instruction], list[tuple[Traffic, float]]]:
    """The collectives and messages of each instruction of a stage, with how often it runs them.

    A message counts for the pass that computes it.
    """
    found: dict[tuple[int, Instruction], list[tuple[Traffic, float]]] = {}
    computes = {Verb.SEND_ACTIVATION: Verb.FORWARD, Verb.SEND_GRADIENT: plan.schedule.input_verb}
    for stage, program in enumerate(plan.schedule.programs):
        for record in plan.traffic:
            if record.stage not in (None, stage):
                continue
            if record.verb in computes:
                pairs = {(at.chunk, at.microbatch) for at in program if at.verb is record.verb}
                passes = [at for at in program if at.verb is computes[record.verb]]
                instructions = [at for at in passes if (at.chunk, at.microbatch) in pairs]
            else:
                instructions = instructions_of(record, plan, program)
            for at in instructions:
                found.setdefault((stage, at), []).append((record, record.times / len(instructions)))
    return found


def _said(records: Sequence[tuple[Traffic, float]], plan: Plan) -> str:
    """What an instruction sends, in words, with the bytes of one rank."""
    said: dict[str, float] = {}
    for record, times in records:
        where = f" over {record.axis}" if record.axis else " inside of the rank"
        size = record.wire_bytes(plan.mesh.degree(record.axis)) if record.axis else record.inside_bytes
        name = f"{record.collective.replace('_', '-')}{where} ({record.what})"
        said[name] = said.get(name, 0.0) + times * size
    parts = [f"{name}: {of_bytes(math.ceil(size))}" for name, size in said.items()]
    return f". Sends: {'; '.join(parts)}" if parts else ""
