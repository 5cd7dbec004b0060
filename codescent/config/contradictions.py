"""In: a config. Out: what of it is right value by value, and wrong together.
Does not know presets, ranks or corpora: what depends on these build refuses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from codescent.base.nearest import nearest_divisors

if TYPE_CHECKING:
    from codescent.config.sections import Config


@dataclass(frozen=True)
class Contradiction:
    """Values that are each right and together wrong; `keys[0]` is the one to name first."""

    keys: tuple[str, ...]
    problem: str


def contradictions(config: Config) -> Iterator[Contradiction]:
    """What no world size, preset or corpus could put right; all else is for `build` to refuse."""
    optimizer, train = config.optimizer, config.train
    if optimizer.min_learning_rate > optimizer.learning_rate:
        yield Contradiction(
            ("optimizer.min_learning_rate", "optimizer.learning_rate"),
            f"given {optimizer.min_learning_rate}, which is above optimizer.learning_rate ({optimizer.learning_rate}); "
            "the learning rate decays towards it",
        )
    if optimizer.decay_steps is not None and optimizer.warmup_steps >= optimizer.decay_steps:
        yield Contradiction(
            ("optimizer.warmup_steps", "optimizer.decay_steps"),
            f"given {optimizer.warmup_steps}, but the decay that follows ends at optimizer.decay_steps "
            f"({optimizer.decay_steps}); must be a whole number from 0 to {optimizer.decay_steps - 1}",
        )
    yield from _without_cuda(config)
    yield from _of_adapters(config)
    size, samples = train.microbatch_size, train.global_batch_size
    if size is not None and samples % size:
        yield Contradiction(
            ("train.microbatch_size", "train.global_batch_size"),
            f"given {size}, which does not divide train.global_batch_size ({samples}); "
            f"the nearest smaller value that does is {nearest_divisors(samples, size)[0]}",
        )


def _of_adapters(config: Config) -> Iterator[Contradiction]:
    """Keys of adapters that there are not, and what does not go with them."""
    lora = config.lora
    if lora.rank is None:
        for name in ("alpha", "targets", "whole"):
            if getattr(lora, name) is not None:
                yield Contradiction((f"lora.{name}", "lora.rank"), "given, but lora.rank is not: there are no adapters")
        return
    if config.train.compile == "model":
        yield Contradiction(
            ("train.compile", "lora.rank"),
            'given "model", but lora.rank is set: the embedding is not trained, and the compiler does not make a '
            'gradient begin behind it; set train.compile to "blocks"',
        )
    if config.parallel.offload == "optimizer":
        yield Contradiction(
            ("parallel.offload", "lora.rank"),
            'given "optimizer", but lora.rank is set: the optimizer has the state of adapters alone, which is small; '
            'set parallel.offload to "none", or to "all" (weights too, with dp_shard and zero_stage 3)',
        )


def _without_cuda(config: Config) -> Iterator[Contradiction]:
    """What needs a CUDA device, or a model that is not compiled. Where train.device is "auto", the ranks find out."""
    train, parallel = config.train, config.parallel
    if train.device == "cpu" and parallel.offload != "none":
        yield Contradiction(
            ("parallel.offload", "train.device"),
            f'given "{parallel.offload}", but train.device is "cpu", whose memory is the host\'s: there is nothing to '
            'offload; leave it "none"',
        )
    if train.device == "cpu" and parallel.data_parallel > 1:
        yield Contradiction(
            ("parallel.data_parallel", "train.device"),
            f'given {parallel.data_parallel}, but train.device is "cpu", and torch.nn.DataParallel divides a batch '
            f"over CUDA devices; for several CPU ranks set parallel.ranks to {parallel.data_parallel}, without it",
        )
    if train.compile != "none" and parallel.pp > 1 and parallel.schedule == "zero-bubble":
        yield Contradiction(
            ("parallel.schedule", "train.compile"),
            f'given "zero-bubble", but train.compile is "{train.compile}": compiled layers make the gradients of their '
            'weights at once and put nothing off; set train.compile to "none", or parallel.schedule to "1f1b"',
        )
    if train.compile != "none" and parallel.data_parallel > 1:
        yield Contradiction(
            ("parallel.data_parallel", "train.compile"),
            f'given {parallel.data_parallel}, but train.compile is "{train.compile}": torch.nn.DataParallel copies '
            'modules in every step, and a compiled one is not copied; set train.compile to "none", or '
            f"parallel.ranks to {parallel.data_parallel} instead of data_parallel",
        )
