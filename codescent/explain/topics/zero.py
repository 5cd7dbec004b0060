"""In: a plan with data-parallel ranks. Out: who holds which part of weights, gradients and optimizer state, stage by
stage of ZeRO, and what the ranks send in a step (Rajbhandari et al. 2020, "ZeRO", figure 1; Zhao et al. 2023, "FSDP").
Does not decide a placement: the plan of each stage has it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from codescent.base.amounts import of_bytes
from codescent.explain.content import Grid, GridCell, Lesson, LessonFrame, TextTable, Tone
from codescent.explain.language import Language
from codescent.explain.topic import Example, LessonInput, Topic, example, multiple
from codescent.plan import Mesh, Plan, TensorPlan
from codescent.plan.state import state_of_rank

STAGES = range(4)
MOST_RANKS = 8
"""More would not fit beside each other; the others are alike."""
KINDS = (Tone.WEIGHTS, Tone.GRADIENTS, Tone.OPTIMIZER)
PART, WHOLE = "part", "whole"
LETTERS = {Tone.WEIGHTS: "W", Tone.GRADIENTS: "G", Tone.OPTIMIZER: "O"}


@dataclass(frozen=True)
class _Layer:
    """Depths of the model that are alike: one row of the grid. `count`: how many depths it stands for."""

    name: str
    tensors: Sequence[TensorPlan]
    count: int = 1


def lesson(asked: LessonInput) -> Lesson:
    """The four stages, then a step of the highest one."""
    say, ranks = asked.say, asked.plan.mesh.dp_replicate * asked.plan.mesh.dp_shard
    plans = [_of_stage(asked, stage, ranks) for stage in STAGES]
    frames = [_held(plans[stage], stage, say) for stage in STAGES]
    frames.append(_sums(plans, say))
    frames += _step(plans[3], say)
    return Lesson(
        topic="zero",
        title=say("ZeRO: ranks share what they would all hold"),
        about=say("Who holds weights (W), gradients (G) and optimizer state (O) of each layer, at each stage."),
        config=asked.config_line,
        frames=frames,
        see=(
            ("codescent plan CONFIG parallel.dp_shard=N parallel.zero_stage=3", say("memory and traffic of a stage")),
            ("codescent docs zero", say("which stage is right, and what each costs")),
        ),
    )


def lacks(plan: Plan) -> str:
    """ZeRO divides among data-parallel ranks."""
    if plan.mesh.dp_replicate * plan.mesh.dp_shard > 1:
        return ""
    return "it divides what data-parallel ranks hold, and this config has one"


def _of_stage(asked: LessonInput, stage: int, ranks: int) -> Plan:
    if stage == 0:
        return asked.other({"parallel.dp_replicate": ranks, "parallel.dp_shard": 1})
    return asked.other({"parallel.dp_replicate": 1, "parallel.dp_shard": ranks, "parallel.zero_stage": stage})


def _layers(plan: Plan, say: Language) -> list[_Layer]:
    """The embedding, the blocks, the head. Of more than four blocks the first, then the others as one row."""
    last = plan.model.num_layers + 1
    at = defaultdict[int, list[TensorPlan]](list)
    for tensor in plan.tensors:
        at[tensor.parameter.depths[0]].append(tensor)
    blocks = list(range(1, last))
    found = [_Layer(say("embedding"), at[0])]
    shown = blocks if len(blocks) <= 4 else blocks[:1]
    found += [_Layer(say("block {number}", number=depth - 1), at[depth]) for depth in shown]
    if len(shown) < len(blocks):
        name = say("blocks {first} to {last}", first=1, last=len(blocks) - 1)
        found.append(_Layer(name, at[blocks[1]], len(blocks) - 1))
    if at[last]:
        found.append(_Layer(say("head"), at[last]))
    return found


def _bytes(layer: _Layer, kind: Tone, mesh: Mesh, rank: int) -> int:
    of = {
        Tone.WEIGHTS: TensorPlan.weights_bytes,
        Tone.GRADIENTS: TensorPlan.gradients_bytes,
        Tone.OPTIMIZER: TensorPlan.optimizer_bytes,
    }[kind]
    return layer.count * sum(of(tensor, mesh, rank) for tensor in layer.tensors)


def _columns(plan: Plan) -> list[int]:
    return list(range(min(plan.mesh.world_size, MOST_RANKS)))


def _heads(ranks: Sequence[int], say: Language) -> list[str]:
    return [say("rank {number}", number=rank) for rank in ranks]


def _legend(say: Language) -> list[tuple[Tone, str]]:
    names = {
        Tone.WEIGHTS: say("weights (W)"),
        Tone.GRADIENTS: say("gradients (G)"),
        Tone.OPTIMIZER: say("optimizer state (O)"),
    }
    return list(names.items())


def _share(part: int, whole: int) -> str:
    if not part:
        return ""
    parts = whole / part
    if parts < 1.05:
        return "1"
    return f"1/{round(parts)}" if abs(parts - round(parts)) < 0.05 * parts else f"1/{parts:.3g}"


def _grid(plan: Plan, say: Language) -> Grid:
    """What each rank holds between two steps, as a share of the whole layer."""
    ranks, rows = _columns(plan), []
    for layer in _layers(plan, say):
        for kind in KINDS:
            whole = _bytes(layer, kind, Mesh(), 0)
            cells = []
            for rank in ranks:
                part = _bytes(layer, kind, plan.mesh, rank)
                text = f"{LETTERS[kind]} {_share(part, whole)}" if part else ""
                cells.append(GridCell(text, kind if part else Tone.NOTHING))
            rows.append((layer.name if kind is KINDS[0] else "", cells))
    return Grid(_heads(ranks, say), rows, say("layer"), _legend(say))


def _held(plan: Plan, stage: int, say: Language) -> LessonFrame:
    titles = (
        say("Stage 0: every rank holds everything"),
        say("Stage 1: the optimizer state is divided"),
        say("Stage 2: the gradients are divided, too"),
        say("Stage 3: the weights are divided, too"),
    )
    why = (
        say("This is plain data parallelism. Gradients are averaged by an all-reduce."),
        say(
            "Each rank updates its part of the weights. Then the ranks gather all updated parts. "
            "Of the gradients it needs its part alone: the sums of several micro-batches stay whole until then."
        ),
        say("A reduce-scatter after each micro-batch gives each rank the sum of its part alone."),
        say("A layer's weights are gathered before it computes, and dropped afterwards."),
    )
    state = state_of_rank(plan, 0)
    total = say(
        "Rank 0 holds {total}: weights {weights}, gradients {gradients}, optimizer {optimizer}.",
        total=of_bytes(state.total_bytes),
        weights=of_bytes(state.weights_bytes),
        gradients=of_bytes(state.gradients_bytes),
        optimizer=of_bytes(state.optimizer_bytes),
    )
    return LessonFrame(titles[stage], (why[stage],), (_grid(plan, say),), (total, *_not_shown(plan, say)))


def _not_shown(plan: Plan, say: Language) -> Iterator[str]:
    if (more := plan.mesh.world_size - MOST_RANKS) > 0:
        yield say.many("{number} more rank is like these.", "{number} more ranks are like these.", more)


def _sums(plans: Sequence[Plan], say: Language) -> LessonFrame:
    rows = []
    for stage, plan in enumerate(plans):
        state = state_of_rank(plan, 0)
        sent = plan.sent_bytes(0, 0)
        parts = (state.weights_bytes, state.gradients_bytes, state.optimizer_bytes, state.total_bytes, sent)
        rows.append([str(stage), *map(of_bytes, parts)])
    heads = [say("stage"), say("weights"), say("gradients"), say("optimizer"), say("held"), say("sent per step")]
    return LessonFrame(
        say("What a stage saves, and what it costs"),
        (say("Bytes of rank 0, from the plan of each stage."),),
        (TextTable(heads, rows, numbers=range(1, 6)),),
        (
            say(
                "With one micro-batch, stages 1 and 2 send as much as stage 0. "
                "Stage 3 gathers weights once more, for backward."
            ),
        ),
    )


def _step(plan: Plan, say: Language) -> Iterator[LessonFrame]:
    """A step of stage 3 for one block: gather, compute, drop; then backward, with sums; then the update."""
    layer = next(one for one in _layers(plan, say) if one.tensors[0].parameter.depths[0] == 1)
    weights, gradients, optimizer = KINDS
    moments = (
        (
            say("Gather {layer} for forward", layer=layer.name),
            say("Each rank sends its part to all others: an all-gather."),
            {weights: WHOLE},
        ),
        (
            say("Compute forward, and drop"),
            say("Each rank computes with its own samples. Then it keeps its part alone."),
            {weights: PART},
        ),
        (
            say("Gather {layer} for backward", layer=layer.name),
            say("Backward needs the weights again."),
            {weights: WHOLE},
        ),
        (
            say("Backward gives gradients"),
            say("Each rank has the whole gradient, of its own samples alone."),
            {gradients: WHOLE},
        ),
        (
            say("Sum and divide the gradients"),
            say("A reduce-scatter: each rank gets the sum of its part. The weights are dropped."),
            {gradients: PART, weights: PART},
        ),
        (
            say("Update"),
            say("Each rank updates its part of the weights and of the optimizer state. The gradients are dropped."),
            {weights: PART, optimizer: PART, gradients: ""},
        ),
    )
    parts = {weights: PART, gradients: "", optimizer: PART}
    for title, why, becomes in moments:
        parts = {**parts, **becomes}
        yield LessonFrame(title, (why,), (_moment(plan, layer, parts, becomes, say),))


def _moment(plan: Plan, layer: _Layer, parts: Mapping[Tone, str], changed: Mapping[Tone, str], say: Language) -> Grid:
    """What each rank holds of a layer in a moment of the step."""
    ranks, rows = _columns(plan), []
    for kind in KINDS:
        whole = _bytes(layer, kind, Mesh(), 0)
        cells = []
        for rank in ranks:
            part = _bytes(layer, kind, plan.mesh, rank)
            share = {PART: _share(part, whole), WHOLE: "1", "": ""}[parts[kind]]
            text = f"{LETTERS[kind]} {share}" if share else ""
            cells.append(GridCell(text, kind if share else Tone.NOTHING, kind in changed))
        rows.append((layer.name if kind is KINDS[0] else "", cells))
    return Grid(_heads(ranks, say), rows, say("layer"), _legend(say))


def _words(ranks: int) -> tuple[str, ...]:
    """That of Samyam Rajbhandari's talks: three layers on three devices."""
    layout = f"parallel.ranks={ranks}", f"parallel.dp_shard={ranks}"
    return example(*layout, layers=3, heads=2, width=96, batch=multiple(12, ranks))


TOPIC = Topic(
    about="who holds weights, gradients and optimizer state, for stages 0 to 3, and what a step sends",
    example=Example(_words, ranks=3, least=2),
    lesson=lesson,
    lacks=lacks,
    gives=({"parallel.ranks": 2}, {"parallel.ranks": 2, "parallel.dp_shard": 2}),
)
