"""In: a trained module, the samples of a split. Out: their mean loss, for the command `codescent evaluate`.
Does not know runs or ranks: during training, train/validate.py computes the validation loss."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from codescent.data.loader import Batch
from codescent.data.samples import Source

TOKENS_AT_ONCE = 8192
"""Tokens in one forward pass without gradients. Few large calls are faster than many small ones."""


def at_once(seq_len: int) -> int:
    """Number of samples of `seq_len` tokens in one forward pass."""
    return max(1, TOKENS_AT_ONCE // seq_len)


def mean_loss(module: nn.Module, source: Source, seq_len: int, device: torch.device) -> tuple[float, int]:
    """The mean loss of all samples of a split, and the number of losses."""
    total, count = 0.0, 0
    for first in range(0, source.num_samples, at_once(seq_len)):
        numbers = np.arange(first, min(first + at_once(seq_len), source.num_samples))
        batch = Batch.of(source.read(numbers)).to(device, next(module.parameters()).dtype)
        with torch.no_grad():
            total += module(batch.inputs, batch.targets, **batch.extras).double().item()
        count += int(source.losses(numbers).sum())
    return total / max(1, count), count
