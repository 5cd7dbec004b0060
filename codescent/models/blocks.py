"""In: activations of one layer. Out: those of the next: pre-norm attention and feed-forward, as GPT-2 has them.
Does not know tokens, losses or other layers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from codescent.models.activation import gelu
from codescent.models.attention import causal_attention
from codescent.models.dropout import drop
from codescent.models.gpt2_shape import GPT2Shape

if TYPE_CHECKING:
    from codescent.models.cache import LayerCache

# Shapes: B batch, T positions, S slots of the cache, D hidden_dim, H heads, K head_dim, E = 3 * D.
DROPOUT_SITES = 3  # in a block: attention probabilities, what attention adds, what the feed-forward adds


class Attention(nn.Module):
    """Causal self-attention; the rows of `qkv` are all of q, then all of k, then all of v, each head by head."""

    def __init__(self, shape: GPT2Shape, device: str) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.dropout = shape.num_heads, shape.head_dim, shape.dropout
        self.qkv = nn.Linear(shape.hidden_dim, 3 * shape.hidden_dim, bias=shape.bias, device=device)
        self.out = nn.Linear(shape.hidden_dim, shape.hidden_dim, bias=shape.bias, device=device)

    def forward(self, x_BTD: Tensor, keys_B: Tensor | None = None, cache: LayerCache | None = None) -> Tensor:
        """What attention adds to the residual stream.

        Args:
            x_BTD: normed activations.
            keys_B: keys of the dropout of the attention probabilities; None drops nothing.
            cache: keys and values of earlier positions; takes these ones too.
        """
        qkv_BTE = self.qkv(x_BTD)
        if keys_B is None and cache is None:
            y_BTD: Tensor = self.out(causal_attention(qkv_BTE, self.head_dim))
            return y_BTD
        batch, length, _ = x_BTD.shape
        q_BTHK, k_BTHK, v_BTHK = qkv_BTE.view(batch, length, 3, -1, self.head_dim).unbind(2)
        q_BHTK = q_BTHK.transpose(1, 2)
        if cache is not None:
            k_BSHK, v_BSHK = cache.extend(k_BTHK, v_BTHK)
            y_BHTK = F.scaled_dot_product_attention(
                q_BHTK, k_BSHK.transpose(1, 2), v_BSHK.transpose(1, 2), attn_mask=cache.mask_B1TS
            )
        else:
            assert keys_B is not None
            y_BHTK = self._dropped(q_BHTK, k_BTHK.transpose(1, 2), v_BTHK.transpose(1, 2), keys_B)
        y_BTD = self.out(y_BHTK.transpose(1, 2).reshape(batch, length, -1))
        return y_BTD

    def _dropped(self, q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, keys_B: Tensor) -> Tensor:
        """Attention with some of its probabilities dropped, which no fused kernel does with our masks."""
        length = q_BHTK.shape[2]
        scores_BHTT = (q_BHTK * (1.0 / math.sqrt(self.head_dim))) @ k_BHTK.transpose(2, 3)
        later_TT = torch.ones(length, length, dtype=torch.bool, device=q_BHTK.device).triu(1)
        probabilities_BHTT = scores_BHTT.masked_fill(later_TT, -math.inf).softmax(-1)
        kept = drop(probabilities_BHTT.flatten(1, 2), keys_B, self.dropout)
        return kept.view_as(probabilities_BHTT) @ v_BHTK


class FeedForward(nn.Module):
    """Linear, GELU (tanh), linear."""

    def __init__(self, shape: GPT2Shape, device: str) -> None:
        super().__init__()
        self.up = nn.Linear(shape.hidden_dim, shape.ffn_dim, bias=shape.bias, device=device)
        self.down = nn.Linear(shape.ffn_dim, shape.hidden_dim, bias=shape.bias, device=device)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """What the feed-forward adds to the residual stream."""
        y_BTD: Tensor = self.down(gelu(self.up(x_BTD)))
        return y_BTD


class Block(nn.Module):
    """One layer: x + attn(norm_1(x)), then x + mlp(norm_2(x))."""

    def __init__(self, shape: GPT2Shape, device: str) -> None:
        super().__init__()
        self.dropout = shape.dropout
        self.norm_1 = nn.LayerNorm(shape.hidden_dim, bias=shape.bias, device=device)
        self.attn = Attention(shape, device)
        self.norm_2 = nn.LayerNorm(shape.hidden_dim, bias=shape.bias, device=device)
        self.mlp = FeedForward(shape, device)

    def forward(self, x_BTD: Tensor, keys_3B: Tensor | None = None, cache: LayerCache | None = None) -> Tensor:
        """The residual stream after this layer.

        Args:
            x_BTD: the residual stream.
            keys_3B: dropout keys of this layer's DROPOUT_SITES; None drops nothing.
            cache: this layer's keys and values of earlier positions, when generating.
        """
        if keys_3B is None:
            x_BTD = x_BTD + self.attn(self.norm_1(x_BTD), None, cache)
            x_BTD = x_BTD + self.mlp(self.norm_2(x_BTD))
        else:
            x_BTD = x_BTD + drop(self.attn(self.norm_1(x_BTD), keys_3B[0], cache), keys_3B[1], self.dropout)
            x_BTD = x_BTD + drop(self.mlp(self.norm_2(x_BTD)), keys_3B[2], self.dropout)
        return x_BTD
