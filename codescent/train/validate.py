"""In: an executor, the validation split. Out: the mean loss per token, the same on every rank.
Does not change the model or the order of training samples."""

from __future__ import annotations

import math

import numpy as np
import torch

from codescent.data.dataset import Split
from codescent.train.execute import Executor

TOKENS_AT_ONCE = 8192
"""Tokens of a forward pass without gradients, where a micro-batch is smaller: fewer, larger calls are faster."""


def validation_loss(executor: Executor, split: Split, most_samples: int | None) -> float:
    """Sum of the token losses of the first samples of `split`, divided by their number of target tokens.

    Each data-parallel part of the ranks reads its own share; the sum is fp64, so that the layout does not show.

    Args:
        executor: of this rank; its model is left in the mode in which it was.
        split: its samples are taken in order, so that every validation loss of a run is of the same text.
        most_samples: how many samples at the most; None: all.
    """
    plan = executor.plan
    seq_len = plan.work.seq_len
    num_samples = min(split.num_samples(seq_len), most_samples or split.num_samples(seq_len))
    part, parts = plan.mesh.dp_index(executor.world.place.rank), plan.mesh.dp
    mine = np.arange(part * num_samples // parts, (part + 1) * num_samples // parts)
    batch = max(plan.work.microbatch_size, TOKENS_AT_ONCE // seq_len)
    # As many on every rank, and some of them on nothing: where weights are gathered, all ranks take part.
    passes = math.ceil(math.ceil(num_samples / parts) / batch)
    total = torch.zeros(1, dtype=torch.float64, device=executor.device)
    with executor.evaluating() as evaluate:
        for number in range(passes):
            samples = mine[number * batch : (number + 1) * batch]
            tokens = torch.from_numpy(split.read(samples if len(samples) else np.zeros(1, int), seq_len))
            loss = evaluate(tokens[:, :-1].to(executor.device), tokens[:, 1:].to(executor.device))
            total += loss if len(samples) else 0.0
    return executor.sum_of_losses(total).item() / (num_samples * plan.work.positions(-1))
