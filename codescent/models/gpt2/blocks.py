"""In: activations of one layer. Out: those of the next: pre-norm attention and feed-forward, as GPT-2 has them.
Does not know tokens, losses or other layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from codescent.models.gpt2.declare import GPT2Shape
from codescent.operators.attention import Attention
from codescent.operators.dropout import drop
from codescent.operators.linear import GeluThenLinear, Linear

if TYPE_CHECKING:
    from codescent.operators.cache import LayerCache

# Shapes: B batch, T positions, D hidden_dim.
DROPOUT_SITES = 3  # in a block: attention probabilities, what attention adds, what the feed-forward adds


class FeedForward(nn.Module):
    """Linear, GELU (tanh), linear."""

    def __init__(self, shape: GPT2Shape, device: str) -> None:
        super().__init__()
        self.up = Linear(shape.hidden_dim, shape.ffn_dim, shape.bias, device)
        self.down = GeluThenLinear(shape.ffn_dim, shape.hidden_dim, shape.bias, device)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """What the feed-forward adds to the residual stream."""
        y_BTD: Tensor = self.down(self.up(x_BTD))
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

    def forward(
        self,
        x_BTD: Tensor,
        keys_3B: Tensor | None = None,
        cache: LayerCache | None = None,
        rows_T: Tensor | None = None,
    ) -> Tensor:
        """The residual stream after this layer.

        Args:
            x_BTD: the residual stream.
            keys_3B: dropout keys of this layer's DROPOUT_SITES; None drops nothing.
            cache: this layer's keys and values of earlier positions, when generating.
            rows_T: the positions that x is of; None: from the first on.
        """
        if keys_3B is None:
            x_BTD = x_BTD + self.attn(self.norm_1(x_BTD), None, cache)
            x_BTD = x_BTD + self.mlp(self.norm_2(x_BTD))
        else:
            x_BTD = x_BTD + drop(self.attn(self.norm_1(x_BTD), keys_3B[0], cache), keys_3B[1], self.dropout, rows_T)
            x_BTD = x_BTD + drop(self.mlp(self.norm_2(x_BTD)), keys_3B[2], self.dropout, rows_T)
        return x_BTD
