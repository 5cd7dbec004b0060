"""In: queries, keys and values of documents that follow each other. Out: causal attention inside of each document, by a
kernel that reads where the documents begin (variable length), so that it computes no pair of two documents.
Does not run on a CPU (block_attention.py does), and does not divide a sequence (strategies/ring.py does)."""

from __future__ import annotations

import torch
from torch import Tensor

from codescent.operators.fused_attention import FLASH, fused_attention_for

# Shapes: B samples, T positions, H query heads, G key-value heads, K head_dim, N documents of all samples; P = B * T.
_OFFERED_ON = ("cuda", "meta")
"""Kinds of devices whose torch has the kernel; meta computes nothing."""


def serves(heads: Tensor) -> bool:
    """Whether there is such a kernel for heads [..., K]: flash attention's, in half precision."""
    return heads.device.type in _OFFERED_ON and fused_attention_for(heads) is FLASH


def attend(
    q_BHTK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, offsets_N: Tensor, window: int, scale: float | None = None
) -> Tensor:
    """Causal attention inside of each document: [B, T, H * K]. `offsets_N`: see `documents.DocumentBounds`.

    `window`: see `ScoreTraits`. `scale`: by what products are multiplied; None: 1 / sqrt(K).

    The longest document is said to be as long as a sample: to know more, the host would wait for the device.
    """
    batch, heads, length, channels = q_BHTK.shape
    q_PHK, k_PGK, v_PGK = (one.flatten(0, 1) for one in (q_BHTK.transpose(1, 2), k_BTGK, v_BTGK))
    dropout, no_debugging = 0.0, False
    y_PHK, *_ = torch.ops.aten._flash_attention_forward(
        q_PHK,
        k_PGK,
        v_PGK,
        offsets_N,
        offsets_N,
        length,
        length,
        dropout,
        not window,
        no_debugging,
        scale=scale,
        window_size_left=window - 1 if window else None,
        window_size_right=0 if window else None,
    )
    y_BTD: Tensor = y_PHK.view(batch, length, heads * channels)
    return y_BTD
