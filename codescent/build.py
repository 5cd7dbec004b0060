"""In: a config, the tokenizer's vocabulary size, the number of ranks. Out: the Plan, or all errors of the config.
Does not start a process, allocate a tensor or import torch. Strategies check their own keys (codescent/strategies)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from codescent import models, tasks
from codescent.base.counted import counted
from codescent.base.errors import UserError
from codescent.base.nearest import nearest_divisors, nearest_multiples
from codescent.base.refusal import Change, Refusal, each
from codescent.config.decided import undivided, with_samples
from codescent.models.lora import declare as lora_shape
from codescent.plan import (
    AXES,
    WIDE,
    Layout,
    Mesh,
    ModelFacts,
    Objective,
    Parameter,
    Placement,
    Plan,
    Scalar,
    TaskFacts,
    TensorPlan,
    Work,
)
from codescent.plan.schedule import accumulate
from codescent.strategies import ORDER, Candidate, serving, traffic_of
from codescent.strategies.common_sums import common_sums
from codescent.strategies.muon import decided
from codescent.strategies.refusals import near_copies, near_degrees, near_meshes, near_ranks, too_long

if TYPE_CHECKING:
    from codescent.config.sections import Config, Parallel

ONE_STATE_TENSOR = ("sgd", "adagrad")
"""Kinds of torch's optimizers with one state tensor per parameter. The others have two; sgd and rmsprop have one fewer
without momentum. Of muon this is the AdamW part: the strategy Muon sets the others."""

MAX_MICROBATCHES = 100_000
"""Largest number of micro-batches of a step, times virtual stages: a plan has an instruction for each."""

MOST_RANKS = 1_000_000
"""More ranks than this are refused: the largest clusters have some hundred thousand devices."""


@dataclass(frozen=True)
class Resolved:
    """Model and task of a config. Code that uses a Plan does not read the sections [model], [data] and [lora] again.

    Attributes:
        model: facts of the model for the plan.
        shape: sizes of the model.
        task: facts of the task for the plan.
        request: the run's request to its task.
        seq_len: number of positions in a sample.
        sample_tokens: tokens of a sample: its positions, or those of its last stream.
    """

    model: ModelFacts
    shape: models.Shape
    task: TaskFacts
    request: tasks.TaskRequest
    seq_len: int
    sample_tokens: int


def resolve(config: Config, vocab_size: int | None) -> Resolved:
    """Resolve the model and the task of a config.

    Args:
        config: of a run.
        vocab_size: of the tokenizer; None: the data is not prepared yet, and the config gives the model's.

    Raises:
        UserError: all problems: sizes that are missing or do not fit each other or the tokenizer, a task that the model
            does not support, adapters for layers that the model lacks.
    """
    problems: list[str] = []
    resolved = _resolve(config, vocab_size, problems)
    if problems or resolved is None:
        raise UserError(*problems)
    return resolved


def build(config: Config, vocab_size: int | None, world_size: int) -> Plan:
    """Build the plan of a run.

    Args:
        config: of the run.
        vocab_size: see `resolve`.
        world_size: number of ranks.

    Raises:
        UserError: all problems of the config.
    """
    config, resolved, candidate = _accepted(config, vocab_size, world_size)
    model, work = candidate.model, candidate.work
    parameters = models.parameters_of(model.kind, resolved.shape, model.lora)
    tensors = tuple(_tensor(parameter, config, work.num_microbatches) for parameter in parameters)
    schedule = accumulate(work.num_microbatches, len(model.forward_flops))
    for strategy in serving(candidate):
        tensors = tuple(strategy.place(tensor, candidate) for tensor in tensors)
        schedule = strategy.schedule(schedule, candidate)
    plan = Plan(
        mesh=candidate.mesh,
        model=model,
        task=candidate.task,
        work=work,
        layout=candidate.layout,
        tensors=tensors,
        schedule=schedule,
        seed=config.run.seed,
        update=candidate.update,
        objective=Objective(config.train.label_smoothing, config.train.z_loss),
    )
    traffic = tuple(record for strategy in serving(plan) for record in traffic_of(strategy, plan))
    return dataclasses.replace(plan, traffic=(*traffic, *common_sums(plan)))


def _accepted(config: Config, vocab_size: int | None, world_size: int) -> tuple[Config, Resolved, Candidate]:
    """The config with the samples of a step, its model and task, and the candidate from which its plan is built.

    Raises:
        UserError: all problems of the config.
    """
    problems: list[str] = []
    resolved = _resolve(config, vocab_size, problems)
    if resolved is None and config.train.global_batch_tokens is not None:  # the samples of a step are unknown
        raise UserError(*problems)
    config = with_samples(config, resolved.sample_tokens if resolved else 0)
    mesh = _mesh(config, world_size, problems)
    batch = _batch(config, mesh, resolved)
    wrong = batch if isinstance(batch, Refusal) else None
    if resolved is None:
        raise UserError(*problems, *filter(None, [wrong, _misfit(config, mesh, world_size, None, _builds)]))
    # Without a solution: values that no strategy refuses, so that no second problem hides the first.
    asked = config.train.microbatch_size
    usual = asked or max(1, config.train.global_batch_size // mesh.dp), mesh.pp if asked else 1
    candidate = _candidate(config, resolved, mesh, world_size, usual if isinstance(batch, Refusal) else batch)
    others = [*too_long(candidate, resolved.shape.seq_len), *_unsupported(config, resolved, candidate)]

    def builds(other: Candidate) -> bool:
        return not (problems or others) and _builds(other)

    misfit = _misfit(config, mesh, world_size, candidate, builds)
    if wrong and misfit and misfit.changes:  # which include a batch
        wrong = Refusal(wrong.said)
    elif wrong and not wrong.startswith("train.microbatch_size"):
        wrong = Refusal(wrong.said, [*wrong.changes, *_on_near_ranks(config, candidate, builds)])
    refused = (problem for strategy in ORDER for problem in strategy.refuse(candidate))
    if found := [*filter(None, [misfit]), *problems, *filter(None, [wrong]), *others, *refused]:
        raise UserError(*found)
    return config, resolved, candidate


def _candidate(config: Config, resolved: Resolved, mesh: Mesh, world_size: int, batch: tuple[int, int]) -> Candidate:
    """`batch`: see `_batch`."""
    microbatch_size, num_microbatches = batch
    work = Work(
        seq_len=resolved.seq_len,
        global_batch_size=config.train.global_batch_size,
        microbatch_size=microbatch_size,
        num_microbatches=num_microbatches,
        precision=config.train.precision,
        streams=resolved.shape.streams,
        prefetch=config.data.prefetch,
    )
    return Candidate(
        mesh=mesh,
        model=resolved.model,
        task=resolved.task,
        work=work,
        layout=Layout(**{field.name: getattr(config.parallel, field.name) for field in dataclasses.fields(Layout)}),
        world_size=world_size,
        microbatch_size=config.train.microbatch_size,
        update=_update(config, mesh),
        batch_tokens=config.train.global_batch_tokens or 0,
        sample_tokens=resolved.sample_tokens,
    )


def _resolve(config: Config, vocab_size: int | None, problems: list[str]) -> Resolved | None:
    """See `resolve`. Adds to `problems`; returns None if the sizes of the model are unknown."""
    try:
        request = task_request(config)
    except UserError as error:
        problems += error.problems
        return None
    shape = _shape(config, request, vocab_size, problems)
    if shape is None:
        return None
    lora, wanted, weights = None, config.lora, config.model.weights
    if wanted.rank is not None:
        try:
            own = models.parameters_of(request.kind, shape)
            lora = lora_shape.resolve(own, wanted.rank, wanted.alpha, wanted.targets, wanted.whole)
        except UserError as error:
            problems += error.problems
    seq_len = shape.seq_len if config.data.seq_len is None else config.data.seq_len
    where = None if weights is None else str(weights)
    tokens = shape.streams[-1] if shape.streams else seq_len
    model = models.facts_of(request.kind, shape, seq_len, lora, config.train.head_chunk_tokens, where)
    return Resolved(model, shape, tasks.task_of(request).facts(request, shape), request, seq_len, tokens)


def _update(config: Config, mesh: Mesh) -> dict[str, Scalar]:
    """The keys of [optimizer] that decide what a step does to the weights, with their values for this mesh."""
    optimizer, train = config.optimizer, config.train
    num_steps = train.num_steps if train.num_epochs is None else None  # None: unknown before the data is prepared
    return {
        **decided(optimizer.model_dump(exclude={"fused"}), train.precision),
        "decay_steps": None if optimizer.schedule == "constant" else optimizer.decay_steps or num_steps,
        "num_workers": 1 if optimizer.scale_learning_rate == "none" else mesh.dp,
    }


def _without(refused: Mapping[str, str], parallel: Parallel, candidate: Candidate) -> Iterator[str]:
    """A problem for each key of [parallel] that is set although the model does not support it."""
    for key, why in refused.items():
        value, mesh = getattr(parallel, key), candidate.mesh
        if mesh.degree(key) > 1 if key in AXES else value and mesh.tp > 1:
            without = _one(candidate, key) if key in AXES else [Change({f"parallel.{key}": False})]
            yield Refusal(f"parallel.{key} = {str(value).lower()}: {why}", without)


def _one(candidate: Candidate, axis: str) -> list[Change]:
    return near_degrees(candidate, axis, 1, lambda other: other.mesh.degree(axis) == 1)


def _unsupported(config: Config, resolved: Resolved, candidate: Candidate) -> Iterator[str]:
    """Problems with settings that model or task do not support: layouts, generating text, torch.compile."""
    kind = resolved.model.kind
    yield from _without(resolved.shape.refuses, config.parallel, candidate)
    yield from tasks.refusals(resolved.request)
    if config.log.sample_tokens and kind not in models.GENERATING:
        yield (
            f"log.sample_tokens = {config.log.sample_tokens}: only {' and '.join(models.GENERATING)} can generate "
            f'text, not model.kind = "{kind}"; set it to 0'
        )
    if config.train.compile != "none" and kind in models.UNCOMPILED:
        yield (
            f'train.compile = "{config.train.compile}": model.kind = "{kind}" {models.UNCOMPILED[kind]}; take '
            'train.compile = "none"'
        )


def task_request(config: Config) -> tasks.TaskRequest:
    """The run's request to its task, without files of a run folder and without pinned values.

    Raises:
        UserError: the task does not exist, or does not support the model's kind.
    """
    return tasks.request_of(config.data, config.model, config.run.seed, config.train.compile)


def needs_vocab_size(config: Config) -> bool:
    """Whether the model's vocabulary size comes from the tokenizer, because the config does not give it."""
    model = config.model
    return model.preset is None and model.vocab_size is None and model.embedding != "none"


def _shape(
    config: Config, request: tasks.TaskRequest, vocab_size: int | None, problems: list[str]
) -> models.Shape | None:
    model = config.model
    sizes = {name: getattr(model, name) for name in models.SIZES if name != "head"}
    if (head := tasks.task_of(request).head) is not None:
        sizes["head"] = head
    if vocab_size is None and (wrong := list(tasks.refusals(request))):
        problems += wrong
        return None
    if needs_vocab_size(config):
        if vocab_size is None:
            problems.append(
                f"model.vocab_size: unknown until the data is prepared; run `codescent data {config.data.corpus} "
                f"--tokenizer {config.data.tokenizer}`, or give model.vocab_size"
            )
            return None
        sizes["vocab_size"] = vocab_size
    try:
        shape = models.shape_of(
            request.kind, sizes, model.preset, bias=model.bias, dropout=model.dropout, tp=config.parallel.tp
        )
    except UserError as error:
        problems += error.problems
        return None
    if vocab_size is not None and shape.vocab_size < vocab_size:
        problems.append(
            f"model.vocab_size = {shape.vocab_size}: the tokenizer {config.data.tokenizer!r} has {vocab_size} tokens; "
            f"give at least {vocab_size}, or another data.tokenizer"
        )
    return shape


def _mesh(config: Config, world_size: int, problems: list[str]) -> Mesh:
    """The mesh of the config; if parallel.dp_replicate is auto, with as many copies as make the run's ranks.

    Raises:
        UserError: `problems` and more ranks than MOST_RANKS: no other check is of use then.
    """
    mesh = Mesh(**{axis: getattr(config.parallel, axis) or 1 for axis in AXES})
    for place, ranks in (("parallel.ranks", world_size), (f"parallel: {_equation(config)}", mesh.world_size)):
        if ranks > MOST_RANKS:
            raise UserError(*problems, f"{place} = {ranks} ranks: more than anybody has; give at most {MOST_RANKS:,}")
    left, rest = divmod(world_size, mesh.world_size // mesh.dp_replicate)
    return mesh if config.parallel.dp_replicate or rest else dataclasses.replace(mesh, dp_replicate=left)


def _equation(config: Config) -> str:
    degrees = {axis: getattr(config.parallel, axis) for axis in AXES}
    return " x ".join(f"{axis} {degree}" for axis, degree in degrees.items() if degree is not None)


def _misfit(
    config: Config, mesh: Mesh, ranks: int, candidate: Candidate | None, builds: Callable[[Candidate], bool]
) -> Refusal | None:
    """A problem if the size of the mesh is not the number of ranks. `candidate`: None if the model is unknown.

    Each change also gives the ranks a batch that they can share.
    """
    if mesh.world_size == ranks:
        return None
    said, copies = f"{counted(mesh.world_size, 'rank')}, but the run has {ranks}", [mesh.dp_replicate]
    near: list[Change] = []
    if config.parallel.dp_replicate is None:
        copy = mesh.world_size
        said = f"{copy} ranks for one copy of the model, which do not divide the run's {counted(ranks, 'rank')}"
        copies = [ranks // copy, ranks // copy + 1]
        near = [Change({}, number) for number in near_ranks(candidate, ranks / copy, builds)] if candidate else []
    ways = near_meshes(candidate, _builds) + (near or near_copies(candidate, copies, builds)) if candidate else []
    return Refusal(f"parallel: {_equation(config)} = {said}", ways)


def _builds(candidate: Candidate) -> bool:
    """Whether no strategy refuses a candidate, and no plan would be too long."""
    mesh, microbatches = candidate.mesh, candidate.work.num_microbatches
    if mesh.world_size > MOST_RANKS or microbatches * _stages(candidate.layout, mesh) > MAX_MICROBATCHES:
        return False
    candidate = dataclasses.replace(candidate, advises=False)
    return not any(True for strategy in ORDER for _ in strategy.refuse(candidate))


def _stages(layout: Parallel | Layout, mesh: Mesh) -> int:
    """Number of (virtual) stages: each has a program with an instruction for each micro-batch."""
    return mesh.pp * (layout.virtual_stages if layout.schedule == "interleaved" else 1) if mesh.pp > 1 else 1


def _batch(config: Config, mesh: Mesh, resolved: Resolved | None) -> tuple[int, int] | Refusal:
    """(microbatch_size, num_microbatches) from: global_batch_size = dp x microbatch_size x num_microbatches.

    If there is no solution, the problem.
    """
    size, microbatch = config.train.global_batch_size, config.train.microbatch_size
    multiple, stages = mesh.pp if config.parallel.schedule == "interleaved" else 1, _stages(config.parallel, mesh)
    unit = mesh.dp * (microbatch or 1) * multiple
    if wrong := undivided(config, resolved.sample_tokens, mesh.dp, unit) if resolved else None:
        return wrong
    share, rest = divmod(size, mesh.dp)
    if rest:
        return Refusal(
            f"train.global_batch_size = {size} does not divide into {mesh.dp} data-parallel ranks",
            each("train.global_batch_size", nearest_multiples(size, unit)),
        )
    if microbatch is None:
        return share, 1
    if share % microbatch:
        divisors = [] if share % multiple else nearest_divisors(share // multiple, microbatch)
        return Refusal(
            f"train.microbatch_size = {microbatch}: {size} (global_batch_size) = {mesh.dp} (data-parallel ranks) x "
            f"{microbatch} (microbatch_size) x {share / microbatch:g}, which is not a whole number of micro-batches",
            each("train.microbatch_size", divisors),
        )
    if share // microbatch * stages > MAX_MICROBATCHES and not (resolved and stages > resolved.model.num_layers):
        where = f" on each of {stages:,} stages" if stages > 1 else ""
        return Refusal(
            f"train.microbatch_size = {microbatch}: a step would have {share // microbatch:,} micro-batches{where}, "
            f"more than {MAX_MICROBATCHES:,}; give at least {-(-share * stages // MAX_MICROBATCHES)}, or a smaller "
            "train.global_batch_size"
        )
    return microbatch, share // microbatch


def _on_near_ranks(config: Config, candidate: Candidate, builds: Callable[[Candidate], bool]) -> list[Change]:
    """The nearest numbers of ranks that can share the batch equally."""
    mesh, ranks = candidate.mesh, near_ranks(candidate, candidate.mesh.dp_replicate, builds)
    if config.parallel.dp_replicate is None:
        return [Change({}, number) for number in ranks]
    one = mesh.world_size // mesh.dp_replicate
    return [Change({"parallel.dp_replicate": number // one}, number) for number in ranks]


def _tensor(parameter: Parameter, config: Config, num_microbatches: int) -> TensorPlan:
    """The plan of a tensor before any strategy changes it.

    Trained bf16 weights have fp32 master copies, optimizer state and sums of gradients. Frozen weights have none.
    """
    precision, optimizer = config.train.precision, config.optimizer
    momentum = optimizer.kind not in ("sgd", "rmsprop") or optimizer.momentum > 0
    return TensorPlan(
        parameter=parameter,
        weight_dtype=precision,
        gradient_dtype=WIDE[precision] if num_microbatches > 1 else precision,
        optimizer_dtype=WIDE[precision],
        master_dtype=WIDE[precision] if WIDE[precision] != precision and parameter.trained else "",
        optimizer_tensors=(1 if optimizer.kind in ONE_STATE_TENSOR else 2) - (not momentum),
        weights=Placement(),
        gradients=Placement(),
        optimizer=Placement(),
    )
