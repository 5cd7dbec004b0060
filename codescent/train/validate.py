"""In: a module, the validation split, this rank's place. Out: the mean loss per token, the same on every rank.
Does not change the module or the order of training samples."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import nn

from codescent.data.dataset import Split
from codescent.plan import Plan
from codescent.train.world import World

TOKENS_AT_ONCE = 8192
"""Tokens of a forward pass without gradients, where a micro-batch is smaller: fewer, larger calls are faster."""


@torch.no_grad()
def validation_loss(module: nn.Module, split: Split, plan: Plan, world: World, most_samples: int | None) -> float:
    """Sum of the token losses of the first samples of `split`, divided by their number of tokens.

    Each data-parallel part of the ranks reads its own share; the sum is fp64, so that the layout does not show.

    Args:
        module: the model, left in the mode in which it was.
        split: its samples are taken in order, so that every validation loss of a run is of the same text.
        plan: sample length, and the mesh that divides the samples.
        world: this rank.
        most_samples: how many samples at the most; None: all.
    """
    seq_len = plan.work.seq_len
    num_samples = min(split.num_samples(seq_len), most_samples or split.num_samples(seq_len))
    part, parts = plan.mesh.dp_index(world.place.rank), plan.mesh.dp
    mine = np.arange(part * num_samples // parts, (part + 1) * num_samples // parts)
    batch = max(plan.work.microbatch_size, TOKENS_AT_ONCE // seq_len)
    # As many on every rank, and some of them on nothing: where weights are gathered, all ranks take part.
    passes = math.ceil(math.ceil(num_samples / parts) / batch)
    total = torch.zeros((), dtype=torch.float64, device=world.device)
    training = module.training
    module.eval()
    for number in range(passes):
        samples = mine[number * batch : (number + 1) * batch]
        tokens = torch.from_numpy(split.read(samples if len(samples) else np.zeros(1, int), seq_len)).to(world.device)
        loss = module(tokens[:, :-1], tokens[:, 1:])
        total += loss if len(samples) else 0.0
    module.train(training)
    world.sum_over_data_parallel(sums := total.cpu().reshape(1))
    mean: float = sums.item() / (num_samples * seq_len)
    return mean
