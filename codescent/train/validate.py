"""In: an executor, the validation split. Out: the mean loss, the same on every rank.
Does not change the model or the order of training samples."""

from __future__ import annotations

import math

import numpy as np
import torch

from codescent.data.loader import Batch
from codescent.data.samples import Source
from codescent.tasks.score import at_once
from codescent.train.execute import Executor


def validation_loss(executor: Executor, source: Source, most_samples: int | None) -> float:
    """Sum of the losses of the first samples of `source`, divided by their number.

    Each data-parallel part of the ranks reads its own share; the sum is fp64, so that the layout does not show.

    Args:
        executor: of this rank; its model is left in the mode in which it was.
        source: its samples are taken in order, so that every validation loss of a run is of the same ones.
        most_samples: how many samples at the most; None: all.
    """
    plan = executor.plan
    num_samples = min(source.num_samples, most_samples or source.num_samples)
    part, parts = plan.mesh.dp_index(executor.world.place.rank), plan.mesh.dp
    mine = np.arange(part * num_samples // parts, (part + 1) * num_samples // parts)
    batch = max(plan.work.microbatch_size, at_once(plan.work.seq_len))
    # As many on every rank, and some of them on nothing: where weights are gathered, all ranks take part.
    passes = math.ceil(math.ceil(num_samples / parts) / batch)
    total = torch.zeros(1, dtype=torch.float64, device=executor.device)
    with executor.evaluating() as evaluate:
        for number in range(passes):
            samples = mine[number * batch : (number + 1) * batch]
            loss = evaluate(Batch.of(source.read(samples if len(samples) else np.zeros(1, np.int64))))
            total += loss if len(samples) else 0.0
    return executor.sum_of_losses(total).item() / _losses(source, num_samples)


def _losses(source: Source, num_samples: int) -> int:
    """How many losses the first samples have."""
    if source.losses_per_sample is not None:
        return num_samples * source.losses_per_sample
    return max(1, int(source.losses(np.arange(num_samples)).sum()))
