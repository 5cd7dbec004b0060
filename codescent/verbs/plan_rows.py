"""In: a plan. Out: the rows of its table: model, mesh, batch, memory, traffic, FLOPs, with readable units (GiB).
Does not print (plan.py does) and does not compute costs (codescent/cost does)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from codescent import tasks
from codescent.base.amounts import of_bytes
from codescent.base.counted import counted, plural
from codescent.clusters.by_links import of_device
from codescent.config.sections import Config
from codescent.cost.activations import is_windowed
from codescent.cost.amounts import Phase, StepBytes, busiest, phases, runs_in
from codescent.cost.memory import inside_bytes
from codescent.cost.stage_memory import memory
from codescent.plan import AXES, DTYPE_BYTES, SENDS, Collective, Mesh, ModelFacts, Plan, Traffic, product_of
from codescent.plan.activations import CPU
from codescent.plan.served import served_bytes
from codescent.verbs.plan_answers import answer_rows
from codescent.verbs.plan_memory import memory_rows
from codescent.verbs.plan_mup import mup_rows

SYNTHETIC = "synthetic: random numbers; the loss has no meaning"
MOST_PURPOSES = 2
"""The largest number of purposes that a line about collectives names."""
MOST_INSTRUCTIONS = 7
"""The largest number of instructions or steps that a line of the program names all."""


def plan_rows(plan: Plan, steps: str, config: Config | None = None) -> list[tuple[str, list[str]]]:
    """A name and lines for each row: mesh, batch arithmetic, parameters, bytes per rank, traffic and FLOPs of a step.

    A line of at most 62 characters fits on a terminal of 80. `steps`: their number in words. `config`: of the command;
    None: see `memory_rows`.
    """
    flops = plan.flops()
    applied = "positions" if plan.work.streams else "tokens"
    keys = "keys in the window" if is_windowed(plan) else "sequence"
    pairs = "channels x pairs of positions" if plan.work.streams else f"layers x channels x {keys} x tokens"
    again = f"{flops.recomputed_flops:.4g} more are recomputed, as in hfu"
    frozen = ", 4 x frozen parameters" if len(plan.trained) < len(plan.tensors) else ""
    return [
        ("task", [tasks.task_line(plan)]),
        *_run_rows(plan),
        *mup_rows(plan),
        ("steps", [steps]),
        *(_stages(plan) if plan.mesh.pp > 1 else []),
        ("program", list(_program(plan))),
        ("precision", _precision(plan)),
        *memory_rows(plan, config),
        *_memory_of_server(plan),
        ("traffic per step", list(_traffic(plan)) or ["none: one rank"]),
        (
            "FLOPs per step",
            [
                f"{flops.total_flops:.4g} by 6 N + attention, as in metrics and MFU",
                f"{flops.dense_flops:.4g} by 6 N: 6 x parameters in products x {applied}{frozen}",
                f"attention: 12 x {pairs}",
                *(["at most: documents are shorter than a sample"] if plan.task.documents else []),
                *([again] if flops.recomputed_flops else []),
            ],
        ),
    ]


def _run_rows(plan: Plan) -> list[tuple[str, list[str]]]:
    """The model, the mesh and the batch."""
    model, work, mesh = plan.model, plan.work, plan.mesh
    samples = counted(work.global_batch_size, "sample")
    vocabulary = f", vocabulary {model.vocab_size:,}" if model.vocab_size else ""
    source = f" (and {work.streams[0]} of the source)" if work.streams else ""
    layers, heads = counted(model.num_layers, "layer"), counted(model.num_heads, "head")
    degrees = product_of({axis: mesh.degree(axis) for axis in AXES})
    servers = f", and {counted(plan.layout.server_ranks, 'server')}" if plan.layout.server_ranks else ""
    each = f"{counted(work.num_microbatches, 'micro-batch')} of {work.microbatch_size}"
    return [
        ("model", [f"{model.kind}: {layers}, {heads}, {counted(model.hidden_dim, 'channel')}{vocabulary}"]),
        *([("data", [SYNTHETIC])] if plan.task.synthetic else []),
        ("parameters", [f"{plan.num_parameters:,}{_trained(plan)}{_active(plan)}"]),
        ("mesh", [f"{degrees} = {counted(mesh.world_size, 'rank')}{servers}"]),
        *([("cache", _cache(plan))] if model.cached else []),
        *([("servers", list(_servers(plan)))] if plan.layout.served else []),
        ("batch", [f"{samples} = {mesh.dp} data-parallel x {each}"]),
        ("tokens per step", [f"{work.tokens:,} = {samples} x {work.positions(-1)}{source}"]),
        *answer_rows(plan),
    ]


def _cache(plan: Plan) -> list[str]:
    """What a cache holds of a token, where it holds no keys and values."""
    model, precision = plan.model, plan.work.precision
    held = of_bytes(model.cached * model.num_layers * DTYPE_BYTES[precision])
    keys = model.num_kv_heads * model.head_dim + model.values
    numbers = f"{model.cached:,} numbers of a token and layer; keys and values: {keys:,}"
    return [numbers, f"{held} of a token in all layers, in {precision}"]


def _active(plan: Plan) -> str:
    """How many of the parameters a token reads, where it does not read all experts."""
    read = round(sum(one.parameter.numel * min(1.0, one.parameter.read_by) for one in plan.tensors))
    return f", of which a token reads {read:,}" if read != plan.num_parameters else ""


def layout_rows(plan: Plan) -> list[tuple[str, list[str]]]:
    """The model, the mesh, the batch and the program: what a price is of."""
    left_out = ("data", "cache", "servers")
    return [*(row for row in _run_rows(plan) if row[0] not in left_out), ("program", list(_program(plan)))]


def _servers(plan: Plan) -> Iterator[str]:
    """Who the parameter servers are, when they update, and the bytes of each."""
    layout, ranks = plan.layout, plan.servers
    who = f"rank{'s' if len(ranks) > 1 else ''} {_shown([str(rank) for rank in ranks])}"
    bound = "" if layout.staleness is None else f", staleness at most {counted(layout.staleness, 'version')}"
    yield f"{who}{'' if layout.server_ranks else ', which also train'}; {layout.updates} updates{bound}"
    held = max(served_bytes(plan.trained, pieces, layout, plan.mesh.world_size) for pieces in plan.pieces)
    yield f"weights and optimizer of a server: at most {of_bytes(held)}"


def _memory_of_server(plan: Plan) -> Iterator[tuple[str, list[str]]]:
    """A row for the server that holds most, if ranks are servers and nothing else."""
    if plan.layout.server_ranks:
        most = max(memory(plan, rank, of_device(CPU)).state for rank in plan.servers)
        yield "  a server", [f"{of_bytes(most)}: weights and optimizer state of its part"]


def _trained(plan: Plan) -> str:
    """The number and share of trained parameters; "" if all are trained."""
    numel = sum(tensor.parameter.numel for tensor in plan.trained)
    return "" if numel == plan.num_parameters else f", {numel:,} of them trained ({numel / plan.num_parameters:.2%})"


def _stages(plan: Plan) -> Iterator[tuple[str, list[str]]]:
    """A row for each pipeline stage: its parameters, share of the FLOPs, and chunks of the model."""
    flops = plan.model.forward_flops
    for stage in range(plan.mesh.pp):
        parts = plan.schedule.parts(stage)
        share = sum(flops[depth] for part in parts for depth in part) / sum(flops)
        parameters = sum(tensor.parameter.numel for tensor in plan.held_by(stage))
        held = "; ".join(_depths(part, plan.model) for part in parts)
        yield f"stage {stage}", [f"{parameters:,} parameters, {share:.0%} of FLOPs: {held}"]


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

    Then the total of the busiest rank, and the bytes that a rank copies between its own memories. What runs once in a
    round says so; opening steps and those before `wire_from` have a line each.
    """
    *earlier, steady = phases(plan)
    kinds: dict[tuple[str, str, int], list[Traffic]] = {}
    for record in runs_in(plan, steady):
        between = "between stages" if record.verb in SENDS else _ranks_of(record, plan.mesh)
        kinds.setdefault((record.collective, between, record.every), []).append(record)
    for (collective, between, every), records in kinds.items():
        roles = range(len(plan.schedule.programs))
        by_stage = [found for role in roles if (found := [t for t in records if t.stage in (None, role)])]
        # A collective has bytes between ranks or, without an axis, bytes between memories of a rank.
        sent = [
            sum(t.times * (t.wire_bytes(plan.mesh.degree(t.axis)) + t.inside_bytes) for t in mine) for mine in by_stage
        ]
        whats = list(dict.fromkeys(record.what for record in records))
        what = f" ({'; '.join(whats)})" if len(whats) <= MOST_PURPOSES else ""
        most = "at most " if len({number for number in sent if number}) > 1 else ""
        steps = f", once in {every} steps" if every > 1 else ""
        yield f"{_counts(by_stage)} {collective} {between}{what}{steps}: {most}{of_bytes(max(sent))}{_hidden(records)}"
    who = "each rank" if len(plan.schedule.programs) == 1 else "the busiest rank"
    if any(record.axis for record in plan.traffic):
        yield f"{who} sends {_in_steps(_sent(plan, steady))}"
    for phase in earlier:
        if phase.until is not None and phase.round_begins + phase.period > phase.until:
            continue  # it is shorter than a round
        yield f"in {_steps_of(phase)} {who} sends {_in_steps(_sent(plan, phase))}"
    if not all(record.axis for record in plan.traffic):
        yield f"each rank copies {of_bytes(inside_bytes(plan))} between its own memories"


def _sent(plan: Plan, phase: Phase) -> StepBytes:
    return busiest(plan, lambda record: record.wire_bytes(plan.mesh.degree(record.axis)), phase)


def _in_steps(sent: StepBytes) -> str:
    """The bytes of a step, and of the worst one where it is another."""
    if sent.worst <= sent.mean:
        return of_bytes(sent.mean)
    return f"{of_bytes(sent.mean)} on average, {of_bytes(sent.worst)} in the worst step"


def _steps_of(phase: Phase) -> str:
    """The steps of a phase that is not the last one, counted from 1."""
    return f"the first {phase.until:,} steps" if not phase.first else f"steps {phase.first + 1:,} to {phase.until:,}"


def _counts(by_stage: list[list[Traffic]]) -> str:
    """How often a rank issues the collectives; the fewest and the most if stages differ."""
    counts = [sum(record.times for record in records) for records in by_stage if records]
    return str(counts[0]) if len(set(counts)) == 1 else f"{min(counts)} to {max(counts)}"


def _hidden(records: list[Traffic]) -> str:
    total = sum(record.times for record in records)
    hidden = sum(record.times for record in records if record.during is not None)
    return f", {'overlapped' if hidden == total else f'{hidden} overlapped'}" if hidden else ""


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
    """The schedule of a pipeline, the instructions of its first and last stage, and those of a round."""
    schedule, layout = plan.schedule, plan.layout
    programs = [[at for at in program if at.step is None] for program in schedule.programs]
    if plan.mesh.pp > 1:
        yield layout.schedule + (f", {layout.virtual_stages} chunks per stage" if layout.virtual_stages > 1 else "")
    for stage in sorted({0, len(programs) - 1}):
        name = ("server" if stage else "worker") if layout.served else f"stage {stage}"
        yield (f"{name}: " if len(programs) > 1 else "") + _shown([str(at) for at in programs[stage]])
    if layout.hands_out:
        every = " or ".join(f"{steps:,}" for steps in schedule.dues)
        yield f"all ranks validate, save and stop together after each {every} steps"
    added = [at for at in schedule.programs[0] if at.step is not None]
    if added:
        fragments = len({at.fragment for at in added if at.fragment is not None})
        of_weights = f", {counted(fragments, 'fragment')} of the weights" if fragments else ""
        agree = f"; all ranks agree after {counted(schedule.agreement, 'step')}" if schedule.agreement else ""
        yield f"a round: {counted(schedule.period, 'step')}{of_weights}{agree}"
    for verb in dict.fromkeys(at.verb for at in added):
        after = [f"{at.step + 1:,}" for at in added if at.verb is verb and at.step is not None]
        yield f"{verb} after step{'s' if len(after) > 1 else ''} {_shown(after)} of the round"
    if schedule.opening_steps:
        axes = " and ".join(sorted({at.axis for at in schedule.opening[0] if at.axis}))
        yield f"the first {counted(schedule.opening_steps, 'step')}: no rounds, gradients summed over {axes}"


def _shown(words: Sequence[str]) -> str:
    """The words in a row; of many the first and the last ones."""
    return ", ".join(words if len(words) <= MOST_INSTRUCTIONS else [*words[:3], "...", *words[-3:]])


def _precision(plan: Plan) -> list[str]:
    tensor = plan.trained[0]
    arithmetic = "" if tensor.weight_dtype == plan.work.precision else f"{plan.work.precision} arithmetic, "
    numbers = {one.optimizer_tensors: one.orthogonalized for one in plan.trained}
    tensors = " and ".join(f"{number}{' (Muon)' if muon else ''}" for number, muon in sorted(numbers.items()))
    state = f"{tensors} {plural(max(numbers), 'optimizer tensor')} in {tensor.optimizer_dtype}"
    state += " and a moving average" if tensor.averaged else ""
    weights = f"{arithmetic}{tensor.weight_dtype} weights, {tensor.gradient_dtype} gradients"
    experts = f" (experts in {plan.work.precision})" if plan.model.num_experts else ""
    if plan.work.fp8:
        emulated = ", emulated" if plan.work.fp8_emulated else ""
        weights += f", products of blocks in fp8 ({plan.work.fp8}{emulated}){experts}"
    if plan.model.lora is not None and plan.model.lora.quantize:
        weights += f", frozen matrices of blocks in {plan.model.lora.quantize}{experts}"
    return (
        [weights, f"{tensor.master_dtype} master weights, {state}"] if tensor.master_dtype else [f"{weights}, {state}"]
    )
