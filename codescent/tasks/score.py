"""In: a trained module, the samples of a split. Out: their mean loss, for the command `codescent evaluate`.
Does not know runs or ranks: during training, train/validate.py computes the validation loss."""

from __future__ import annotations

from typing import cast

import numpy as np
import torch
from torch import nn

from codescent.base.device import free_memory, offered, wide_dtype
from codescent.base.device_kinds import GPUS
from codescent.data.loader import InOrder
from codescent.data.samples import Source
from codescent.models.part import Part

TOKENS_AT_ONCE = 8192
"""Tokens in one forward pass without gradients. Few large calls are faster than many small ones."""

TOKENS_ON_CUDA = 65_536
"""The same on CUDA, where 8192 tokens of a small model take less time than to launch them."""

FREE_SHARE = 0.5
"""Share of the free memory of a device that the activations of a pass may take."""


def at_once(seq_len: int, device: torch.device | None = None) -> int:
    """Number of samples of `seq_len` tokens in one forward pass. None: a CPU."""
    on_cpu = device is None or device.type == "cpu"
    return max(1, (TOKENS_AT_ONCE if on_cpu else TOKENS_ON_CUDA) // seq_len)


def fitting(module: nn.Module, seq_len: int, device: torch.device) -> int:
    """`at_once`, or fewer samples if the device has less memory free.

    A matrix [outputs, inputs] of a block makes `outputs` numbers for a token. Without gradients one block's are alive
    at a time.
    """
    samples = at_once(seq_len, device)
    if device.type not in GPUS:
        return samples
    part, free_bytes = cast(Part, module), free_memory(device)
    blocks = (sum(p.numel() * p.itemsize for p in block.parameters()) for block in part.blocks.values())
    token_bytes = -(-max(blocks) // part.shape.hidden_dim)
    return max(1, min(samples, int(FREE_SHARE * free_bytes) // (seq_len * token_bytes)))


def mean_loss(module: nn.Module, source: Source, seq_len: int, device: torch.device) -> tuple[float, int]:
    """The mean loss of all samples of a split, and the number of losses."""
    total, count = torch.zeros((), dtype=wide_dtype(device), device=device), 0
    dtype, pins = next(module.parameters()).dtype, offered(device).pins
    numbers = np.arange(source.num_samples)
    with InOrder(source, numbers, fitting(module, seq_len, device), pin_memory=pins) as loader, torch.no_grad():
        for _ in range(loader.passes):
            portion = loader.next()
            batch = portion.batches[0].to(device, dtype)
            total += module(batch.inputs, batch.targets, **batch.extras).to(total.dtype)
            count += portion.losses
    return total.item() / max(1, count), count
