"""In: the sections [model], [data] and [lora] of a config, the tokenizer's vocabulary size. Out: its model and task.
Does not look at the layout, the batch or the ranks (accept.py does), and does not read data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from codescent import models, tasks
from codescent.base.command import command
from codescent.base.errors import UserError
from codescent.config.decided import head_chunk_tokens
from codescent.models.lora import declare as lora_shape
from codescent.plan import ModelFacts, TaskFacts

if TYPE_CHECKING:
    from codescent.config.sections import Config


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
    resolved = resolve_into(config, vocab_size, problems)
    if problems or resolved is None:
        raise UserError(*problems)
    return resolved


def resolve_into(config: Config, vocab_size: int | None, problems: list[str]) -> Resolved | None:
    """See `resolve`. Adds to `problems` instead of raising; returns None if the sizes of the model are unknown."""
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
            start = None if wanted.weights is None else str(wanted.weights)
            method = lora_shape.Method(
                wanted.rslora, wanted.dropout, wanted.dora, start, wanted.quantize.replace("none", "")
            )
            lora = lora_shape.resolve(own, wanted.rank, wanted.alpha, wanted.targets, wanted.whole, method)
        except UserError as error:
            problems += error.problems
    if weights is None and shape.needs_weights:
        problems.append(shape.needs_weights)
    seq_len = shape.seq_len if config.data.seq_len is None else config.data.seq_len
    where = None if weights is None else str(weights)
    tokens = shape.streams[-1] if shape.streams else seq_len
    model = models.facts_of(request.kind, shape, seq_len, lora, head_chunk_tokens(config), where)
    if weights is not None and config.model.adapters is not None:
        model = replace(model, adapters=str(config.model.adapters))
    return Resolved(model, shape, tasks.task_of(request).facts(request, shape), request, seq_len, tokens)


def task_request(config: Config) -> tasks.TaskRequest:
    """The run's request to its task, without files of a run folder and without pinned values.

    Raises:
        UserError: the task does not exist, or does not support the model's kind.
    """
    return tasks.request_of(config.data, config.model, config.run.seed, config.train)


def has_sizes(config: Config, vocab_size: int | None) -> bool:
    """Whether the sizes of the model are complete and fit each other."""
    return _shape(config, task_request(config), vocab_size, []) is not None


def needs_vocab_size(config: Config) -> bool:
    """Whether the model's vocabulary size comes from the tokenizer, because the config does not give it."""
    model = config.model
    given = model.preset, model.vocab_size, model.config
    return all(one is None for one in given) and model.embedding != "none"


def _how_to_prepare(request: tasks.TaskRequest) -> list[str]:
    """The commands that prepare the corpora of a run."""
    data = [one.data for one in request.corpora.values()] or [request.data]
    return [f"`{command('data', one.corpus, '--tokenizer', one.tokenizer)}`" for one in data]


def _shape(
    config: Config, request: tasks.TaskRequest, vocab_size: int | None, problems: list[str]
) -> models.Shape | None:
    model = config.model
    sizes = {name: getattr(model, name) for name in models.SIZES if name != "head"}
    if (head := tasks.task_of(request).head) is not None:
        sizes["head"] = head
    if needs_vocab_size(config):
        if vocab_size is None:
            problems += list(tasks.refusals(request)) or [
                "model.vocab_size: unknown until the data is prepared; run "
                f"{' and '.join(_how_to_prepare(request))}, or give model.vocab_size"
            ]
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
        more = f"give at least {vocab_size}, or another data.tokenizer"
        if model.weights is not None:  # they decide the rows
            from codescent.huggingface.folder import more_rows  # noqa: PLC0415 - for this message alone

            more = f"model.weights = {model.weights} decides the rows; {more_rows(vocab_size)}"
        problems.append(
            f"model.vocab_size = {shape.vocab_size}: the tokenizer {config.data.tokenizer!r} has {vocab_size} tokens; "
            f"{more}"
        )
    return shape
