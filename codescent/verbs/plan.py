"""In: arguments of `codescent plan`. Out: the printed plan: a table with readable units (GiB), or JSON.
Does not compute costs (codescent/cost does) and does not draw (timeline.py does)."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator

from rich import box
from rich.console import Console
from rich.table import Table

from codescent import tasks
from codescent.base.errors import UserError
from codescent.base.output import warn
from codescent.cost.memory import StateBytes, inside_bytes, state_bytes, wire_bytes
from codescent.plan import AXES, SENDS, Collective, Memory, Mesh, ModelFacts, Plan, Traffic
from codescent.preflight import absent, notes, plan_of, steps_in_words
from codescent.verbs.config import resolved_of
from codescent.verbs.timeline import draw_plan, refusals

SYNTHETIC = "synthetic: random numbers, for speed measurements; the loss has no meaning"


def main(arguments: Namespace) -> int:
    """Print the plan of a config. Draw its timeline if --timeline names a file."""
    file = arguments.timeline
    problems = [] if file is None else list(refusals(file))
    try:
        loaded = resolved_of(arguments)
    except UserError as error:
        raise UserError(*problems, *error.problems) from error
    if problems:
        raise UserError(*problems)
    missing = absent(loaded.config)
    plan = plan_of(loaded.config, loaded.config.parallel.ranks, without_data=bool(missing))
    for sentence in [*notes(loaded), *missing]:
        warn(sentence)
    if file is not None:
        draw_plan(plan, file)
    if arguments.json:
        print(json.dumps(plan.to_json(), indent=1))
    else:
        show_plan(plan, steps_in_words(loaded.config))
    return 0


def show_plan(plan: Plan, steps: str) -> None:
    """Print the plan: mesh, batch arithmetic, parameters, bytes per rank, traffic and FLOPs of a step.

    `steps`: their number in words.
    """
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, value in _plan_rows(plan, steps):
        table.add_row(name, value)
    Console(highlight=False, markup=False).print(table)


def _plan_rows(plan: Plan, steps: str) -> list[tuple[str, str]]:
    model, work, mesh, state, flops = plan.model, plan.work, plan.mesh, state_bytes(plan), plan.flops()
    fullest = " on the fullest stage" if mesh.pp > 1 else ""
    pairs = "channels x pairs of positions" if work.streams else "layers x channels x sequence x tokens"
    return [
        ("task", tasks.task_line(plan)),
        (
            "model",
            f"{model.kind}: {model.num_layers} layers, {model.num_heads} heads, {model.hidden_dim} channels, "
            f"vocabulary {model.vocab_size:,}",
        ),
        *([("data", SYNTHETIC)] if plan.task.synthetic else []),
        ("parameters", f"{plan.num_parameters:,}{_trained(plan)}"),
        ("mesh", " x ".join(f"{axis} {mesh.degree(axis)}" for axis in AXES) + f" = {mesh.world_size} rank(s)"),
        (
            "batch",
            f"{work.global_batch_size} samples = {mesh.dp} data-parallel x {work.microbatch_size} per micro-batch x "
            f"{work.num_microbatches} micro-batch(es)",
        ),
        (
            "target tokens per step" if work.streams else "tokens per step",
            f"{work.tokens:,} = {work.global_batch_size} samples x {work.positions(-1)}"
            + (f" (and {work.streams[0]} of the source)" if work.streams else ""),
        ),
        ("steps", steps),
        *([("stages", "\n".join(_stages(plan)))] if mesh.pp > 1 else []),
        ("program", "\n".join(_program(plan))),
        ("precision", _precision(plan)),
        ("weights, per rank", _bytes(state.weights_bytes) + _where(plan.tensors[0].weights_in)),
        ("gradients, per rank", _bytes(state.gradients_bytes) + _where(plan.trained[0].gradients_in)),
        ("optimizer, per rank", _bytes(state.optimizer_bytes) + _where(plan.trained[0].optimizer_in)),
        ("together, per rank", _together(state, fullest)),
        ("traffic per step", "\n".join(_traffic(plan)) or "none: one rank"),
        (
            "FLOPs per step, 6 N",
            f"{flops.dense_flops:.4g} (6 x parameters in products x {'positions' if work.streams else 'tokens'}"
            f"{', 4 x frozen parameters' if len(plan.trained) < len(plan.tensors) else ''})",
        ),
        (
            "FLOPs per step, 6 N + attention",
            f"{flops.total_flops:.4g} (and 12 x {pairs}; metrics and MFU use this one)",
        ),
    ]


def _trained(plan: Plan) -> str:
    """The number and share of trained parameters; "" if all are trained."""
    numel = sum(tensor.parameter.numel for tensor in plan.trained)
    return "" if numel == plan.num_parameters else f", {numel:,} of them trained ({numel / plan.num_parameters:.2%})"


def _stages(plan: Plan) -> Iterator[str]:
    """A line for each pipeline stage: its chunks of the model, parameters and share of the FLOPs."""
    flops = plan.model.forward_flops
    for stage in range(plan.mesh.pp):
        parts = plan.schedule.parts(stage)
        share = sum(flops[depth] for part in parts for depth in part) / sum(flops)
        parameters = sum(tensor.parameter.numel for tensor in plan.held_by(stage))
        held = "; ".join(_depths(part, plan.model) for part in parts)
        yield f"stage {stage}: {held} ({parameters:,} parameters, {share:.0%} of the FLOPs)"


def _depths(part: range, model: ModelFacts) -> str:
    """The layers of a chunk of the model in words, such as "embedding, layers 0 to 3"."""
    words = ["embedding"] if 0 in part else []
    ends = (0, model.encoder_layers, model.num_layers)
    for name, first, end in zip(("encoder ", "decoder "), ends, ends[1:]):
        layers = [depth - 1 for depth in part if first < depth <= end]
        stack = name if model.encoder_layers else ""
        if layers:
            several = f"s {layers[0]} to {layers[-1]}" if len(layers) > 1 else f" {layers[0]}"
            words.append(f"{stack}layer{several}")
    return ", ".join([*words, *(["head"] if model.num_layers + 1 in part else [])]) or "nothing"


def _traffic(plan: Plan) -> Iterator[str]:
    """A line for each kind of collective on each axis, with the most bytes that a rank sends.

    Then the total of the busiest rank, and the bytes that a rank copies between its own memories.
    """
    kinds: dict[tuple[str, str], list[Traffic]] = {}
    for record in plan.traffic:
        between = "between stages" if record.verb in SENDS else _ranks_of(record, plan.mesh)
        kinds.setdefault((record.collective, between), []).append(record)
    for (collective, between), records in kinds.items():
        by_stage = [[t for t in records if t.stage in (None, stage)] for stage in range(plan.mesh.pp)]
        sent = [sum(t.times * t.wire_bytes(plan.mesh.degree(t.axis)) for t in mine) for mine in by_stage]
        whats = {record.what for record in records}
        what = f" ({whats.pop()})" if len(whats) == 1 else ""
        most = "at most " if len({number for number in sent if number}) > 1 else ""
        yield f"{_counts(by_stage)} {collective} {between}{what}: {most}{_bytes(max(sent))}{_hidden(records)}"
    if any(record.axis for record in plan.traffic):
        yield f"{'each rank sends' if plan.mesh.pp == 1 else 'the busiest rank sends'} {_bytes(wire_bytes(plan))}"
    if not all(record.axis for record in plan.traffic):
        yield f"each rank copies {_bytes(inside_bytes(plan))} between its own memories"


def _where(memory: Memory) -> str:
    return ", in the host's memory" if memory is Memory.HOST else ""


def _together(state: StateBytes, fullest: str) -> str:
    if not state.host_bytes:
        return f"{_bytes(state.total_bytes)}{fullest}, activations not counted"
    device, host = _bytes(state.device_bytes), _bytes(state.host_bytes)
    return f"{device} on the device{fullest}, activations not counted; {host} in the host's memory"


def _counts(by_stage: list[list[Traffic]]) -> str:
    """How often a rank issues the collectives; one number for each stage if the numbers differ."""
    counts = {stage: sum(record.times for record in records) for stage, records in enumerate(by_stage) if records}
    if len(set(counts.values())) == 1:
        return str(next(iter(counts.values())))
    numbers, stages = ", ".join(map(str, counts.values())), ", ".join(map(str, counts))
    return f"{numbers} (on stages {stages})"


def _hidden(records: list[Traffic]) -> str:
    total = sum(record.times for record in records)
    hidden = sum(record.times for record in records if record.during is not None)
    return f", {'all' if hidden == total else hidden} of them during forward or backward" if hidden else ""


def _ranks_of(record: Traffic, mesh: Mesh) -> str:
    """The ranks that communicate, and their number; or the memories of a rank between which it copies."""
    axis = record.axis
    if not axis:
        where = "device and host" if record.collective is Collective.COPY else f"{record.devices} devices of the rank"
        return f"between {where}"
    degree = mesh.degree(axis)
    name, _, some = axis.partition("[")
    if name == "pp" and some:
        return f"between stages {' and '.join(some.rstrip(']').split(','))}"
    if "*" in axis and degree == mesh.world_size:
        return f"over all {degree} ranks"
    return f"over {axis.replace('*', ' x ')} ({degree} ranks)"


def _program(plan: Plan) -> Iterator[str]:
    """The instructions of the first and of the last stage."""
    programs = plan.schedule.programs
    for stage in sorted({0, len(programs) - 1}):
        words = [str(instruction) for instruction in programs[stage]]
        shown = words if len(words) <= 11 else [*words[:6], "...", *words[-3:]]
        yield (f"stage {stage}: " if len(programs) > 1 else "") + ", ".join(shown)


def _precision(plan: Plan) -> str:
    tensor = plan.trained[0]
    arithmetic = "" if tensor.weight_dtype == plan.work.precision else f"{plan.work.precision} arithmetic, "
    master = f", {tensor.master_dtype} master weights" if tensor.master_dtype else ""
    numbers = {one.optimizer_tensors: one.orthogonalized for one in plan.trained}
    tensors = " and ".join(f"{number}{' (Muon)' if muon else ''}" for number, muon in sorted(numbers.items()))
    return (
        f"{arithmetic}{tensor.weight_dtype} weights, {tensor.gradient_dtype} gradients{master}, "
        f"{tensors} optimizer tensors in {tensor.optimizer_dtype}"
    )


def _bytes(number: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= size:
            return f"{number / size:,.2f} {unit}"
    return f"{number:,.0f} bytes"
