"""In: a config, the tokens of a sample, the number of samples. Out: the config with the samples and the number of steps
that its keys train.global_batch_tokens and train.num_epochs decide; the tokens of the head that train.device decides.
Does not know models and data (build and preflight do)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from codescent.base.counted import counted
from codescent.base.device_kinds import AUTO, CPU, kernels_of, kind_of
from codescent.base.errors import UserError
from codescent.base.nearest import nearest_multiples
from codescent.base.refusal import Refusal, each

if TYPE_CHECKING:
    from codescent.config.sections import Compiled, Config


HEAD_CHUNK_TOKENS: Mapping[str, int] = {"cpu": 1024, "cuda": 8192}
"""On a CPU, logits that stay in the caches are faster. On CUDA, fewer products and sums of gradients are."""


def head_chunk_tokens(config: Config) -> int:
    """`train.head_chunk_tokens`; if it is auto the number of `train.device`, and that of a CPU if that is auto, too.

    A run knows its device (`with_device`); a plan that is made before does not.
    """
    given, device = config.train.head_chunk_tokens, config.train.device
    return HEAD_CHUNK_TOKENS[CPU if device == AUTO else kernels_of(device)] if given is None else given


def compiles(config: Config, device: str) -> Compiled:
    """What torch.compile compiles on a kind of device: with `train.compile` = auto blocks on CUDA and XPU.

    A plan may refuse it (build/compiled.py), and a run may find no compiler that works (train/compiling.py).
    """
    train = config.train
    if train.compile is not None:
        return train.compile
    return (
        "none" if not kind_of(device).compiles or train.deterministic or config.parallel.data_parallel > 1 else "blocks"
    )


def with_device(config: Config, device: str) -> Config:
    """The config with this `train.device`."""
    return _with_train(config, device=device)


def with_samples(config: Config, sample_tokens: int) -> Config:
    """The config with the samples of `train.global_batch_tokens`, rounded down, in `train.global_batch_size`."""
    train, tokens = config.train, config.train.global_batch_tokens
    if tokens is None:
        return config
    values = {**dict(train), "global_batch_size": max(1, tokens // sample_tokens)}
    decided = type(train).model_construct(set(train.model_fields_set), **values)  # no file gives the samples
    return config.model_copy(update={"train": decided})


def without_tokens(config: Config) -> Config:
    """The config of a run with `with_samples`: only the samples are recorded."""
    if config.train.global_batch_tokens is None:
        return config
    return _with_train(config, global_batch_tokens=None, global_batch_size=config.train.global_batch_size)


def undivided(config: Config, sample_tokens: int, dp: int, unit: int) -> Refusal | None:
    """A problem if `train.global_batch_tokens` is not a whole number of micro-batches on each data-parallel rank.

    Args:
        sample_tokens: tokens that a sample adds to a step's tokens.
        dp: number of data-parallel ranks.
        unit: samples of which every number that would do is a multiple.
    """
    tokens, microbatch = config.train.global_batch_tokens, config.train.microbatch_size or 1
    smallest = sample_tokens * microbatch * dp
    if tokens is None or tokens % smallest == 0:
        return None
    return Refusal(
        f"train.global_batch_tokens = {tokens}: not a multiple of {smallest} = {sample_tokens} tokens of a sample x "
        f"{counted(microbatch, 'sample')} of a micro-batch x {counted(dp, 'data-parallel rank')}",
        each("train.global_batch_tokens", nearest_multiples(tokens, sample_tokens * unit)),
    )


def with_steps(config: Config, num_samples: int) -> Config:
    """The config with the steps of `train.num_epochs` in `train.num_steps`, and of `parallel.average_every`.

    An epoch is a whole number of steps (decision 4). A part of an epoch is rounded to whole steps, at least one.

    Args:
        config: `with_samples`.
        num_samples: of the training split.
    """
    epochs, per_epoch = config.train.num_epochs, num_samples // config.train.global_batch_size
    period = config.parallel.average_every
    if isinstance(period, str):
        steps = max(1, round(float(period.split(" ")[0]) * per_epoch))
        config = config.model_copy(update={"parallel": config.parallel.model_copy(update={"average_every": steps})})
    if epochs is None:
        return config
    return _with_train(config, num_steps=max(1, round(epochs * per_epoch)), num_epochs=None)


def as_given(error: UserError, config: Config) -> UserError:
    """Problems found `with_steps`, for a config that gives epochs, as a new error.

    Messages on `train.num_steps` name the epochs that it comes from. Advice that sets it removes `train.num_epochs`.

    Args:
        error: the problems.
        config: before `with_steps`.
    """
    epochs, begins = config.train.num_epochs, "train.num_steps = "

    def told(problem: str) -> str:
        if epochs is None or not isinstance(problem, Refusal):
            return problem
        said = problem.said
        if said.startswith(begins):
            said = f"train.num_steps (of {counted(epochs, 'epoch')}) = {said.removeprefix(begins)}"
        changes = (
            change.and_also({"train.num_epochs": None}) if "train.num_steps" in change.values else change
            for change in problem.changes
        )
        return Refusal(said, changes)

    return UserError(*map(told, error.problems))


def averages_in_epochs(config: Config) -> bool:
    """Whether `parallel.average_every` counts epochs."""
    return isinstance(config.parallel.average_every, str)


def needs_samples(config: Config) -> bool:
    """Whether the number of training samples decides keys of the config: those that count in epochs."""
    return config.train.num_epochs is not None or averages_in_epochs(config)


def _with_train(config: Config, **values: Any) -> Config:
    return config.model_copy(update={"train": config.train.model_copy(update=values)})
