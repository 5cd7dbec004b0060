"""In: an executor, the validation split. Out: the mean loss, equal on every rank; also that of averaged weights.
Does not change the model or the order of training samples."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch

from codescent.base.device import offered, wide_dtype
from codescent.data.loader import InOrder
from codescent.data.mixture import MixedSource, corpora_of
from codescent.data.samples import Source
from codescent.plan import Plan
from codescent.tasks.score import at_once
from codescent.train.execute import Executor
from codescent.train.trainer import Trainer


class Validated(NamedTuple):
    """The validation loss of the weights, and that of their moving average; None: not validated, or there is none.

    `by_corpus`: of the weights, for each corpus of a mixture.
    """

    loss: float | None = None
    of_ema: float | None = None
    by_corpus: Mapping[str, float] = MappingProxyType({})

    @property
    def known(self) -> float:
        """The loss of the weights, where they were validated."""
        assert self.loss is not None
        return self.loss


def validated(trainer: Trainer, source: Source, most_samples: int | None) -> Validated:
    """Validate the weights, or the mean of the replicas, and their moving average if there is one. Collective."""
    trainer.executor.let_change()  # means and averages take the place of the weights
    with trainer.with_means():
        loss, by_corpus = losses_on_all_ranks(trainer.executor, source, most_samples)
    if not trainer.ema.decay:
        return Validated(loss, None, by_corpus)
    with trainer.ema.in_place_of_weights():
        return Validated(loss, losses_on_all_ranks(trainer.executor, source, most_samples)[0], by_corpus)


def losses_on_all_ranks(
    executor: Executor, source: Source, most_samples: int | None
) -> tuple[float, Mapping[str, float]]:
    """The validation loss; of a mixture the mean over its corpora, and the loss of each. Collective."""
    if not isinstance(source, MixedSource):
        return loss_on_all_ranks(executor, source, most_samples), {}
    by_corpus = {name: loss_on_all_ranks(executor, one, most_samples) for name, one in corpora_of(source).items()}
    return source.mean(by_corpus, most_samples), by_corpus


def loss_on_all_ranks(executor: Executor, source: Source, most_samples: int | None) -> float:
    """`validation_loss`, also on ranks that compute nothing: rank 0 tells them. Collective."""
    loss = validation_loss(executor, source, most_samples) if executor.chunks else 0.0
    some_compute_nothing = executor.plan.world_size > executor.plan.mesh.world_size
    return executor.world.from_first(lambda: loss) if some_compute_nothing else loss


def validation_loss(executor: Executor, source: Source, most_samples: int | None) -> float:
    """Mean loss of the first samples of `source`.

    Each data-parallel rank reads its share. The sum is fp64, so that rounding hardly depends on the layout.

    Args:
        executor: of this rank; its model returns to the mode (training or evaluation) that it had.
        source: is read in order, so that all validation losses of a run use the same samples.
        most_samples: largest number of samples; None: all.
    """
    plan = executor.plan
    num_samples = min(source.num_samples, most_samples or source.num_samples)
    part, parts = executor.world.share(plan)
    mine = np.arange(part * num_samples // parts, (part + 1) * num_samples // parts)
    batch = samples_at_once(plan, executor.device)
    # Every rank makes the same number of passes, even without samples of its own: all-gathers need all ranks.
    passes = math.ceil(math.ceil(num_samples / parts) / batch)
    total = torch.zeros(1, dtype=wide_dtype(executor.device), device=executor.device)
    pins = offered(executor.device).pins
    with InOrder(source, mine, batch, passes, pins) as loader, executor.evaluating() as evaluate:
        for _ in range(passes):
            portion = loader.next()
            executor.note_data(executor.number + 1, portion)
            loss = evaluate(portion.batches[0])
            total += loss if portion.losses else 0.0
    return executor.sum_of_losses(total).item() / max(1, int(source.losses(np.arange(num_samples)).sum()))


def samples_at_once(plan: Plan, device: torch.device) -> int:
    """Samples of a pass, the same on all ranks.

    On CUDA as many tokens as `at_once` allows there, but no more than fit in the memory of a training step. A pass
    without gradients keeps the activations of one block at a time. Training keeps those of all blocks of a stage, or
    of one block if it recomputes them. Logits are those of a micro-batch at most (assemble.py).
    """
    size, length = plan.work.microbatch_size, plan.work.seq_len
    if device.type == "cpu":
        return max(size, at_once(length))
    blocks = 1 if plan.layout.recompute == "full" else max(1, plan.model.num_layers // plan.mesh.pp)
    return max(size, at_once(length), min(size * blocks, at_once(length, device)))
