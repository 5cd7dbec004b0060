"""In: an executor, the validation split. Out: the mean loss, equal on every rank.
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
    """Mean loss of the first samples of `source`.

    Each data-parallel rank reads its share. The sum is fp64, so that rounding hardly depends on the layout.

    Args:
        executor: of this rank; its model returns to the mode (training or evaluation) that it had.
        source: is read in order, so that all validation losses of a run use the same samples.
        most_samples: largest number of samples; None: all.
    """
    plan = executor.plan
    num_samples = min(source.num_samples, most_samples or source.num_samples)
    part, parts = plan.mesh.dp_index(executor.world.place.rank), plan.mesh.dp
    mine = np.arange(part * num_samples // parts, (part + 1) * num_samples // parts)
    batch = max(plan.work.microbatch_size, at_once(plan.work.seq_len))
    # Every rank makes the same number of passes, even without samples of its own: all-gathers need all ranks.
    passes = math.ceil(math.ceil(num_samples / parts) / batch)
    total = torch.zeros(1, dtype=torch.float64, device=executor.device)
    with executor.evaluating() as evaluate:
        for number in range(passes):
            samples = mine[number * batch : (number + 1) * batch]
            loss = evaluate(Batch.of(source.read(samples if len(samples) else np.zeros(1, np.int64))))
            total += loss if len(samples) else 0.0
    return executor.sum_of_losses(total).item() / max(1, int(source.losses(np.arange(num_samples)).sum()))
