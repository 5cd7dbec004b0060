"""In: activations of one layer. Out: those of the next: a layer of the encoder, a layer of the decoder.
Does not know tokens, losses or other layers."""

from __future__ import annotations

from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from codescent.models.decoder import ResidualBlock
from codescent.models.transformer.declare import TransformerShape
from codescent.operators.attention import Attention, CrossAttention
from codescent.operators.dropout import drop
from codescent.operators.linear import Linear

# Shapes: B batch, S positions of the source, T of the target, D hidden_dim, F ffn_dim.
DROPOUT_SITES = 6  # in a block: probabilities and output of attention, twice; inside and output of the feed-forward


class FeedForward(nn.Module):
    """Linear, ReLU or GELU, dropout, linear."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.dropout, self.activation = shape.dropout, shape.activation
        self.up = Linear(shape.hidden_dim, shape.ffn_dim, shape.bias)
        self.down = Linear(shape.ffn_dim, shape.hidden_dim, shape.bias)

    def forward(self, x_BTD: Tensor, keys_B: Tensor | None = None) -> Tensor:
        """[B, T, D]; `keys_B` are keys of the dropout between the two matrices, None drops nothing."""
        h_BTF = self.up(x_BTD)
        # ReLU overwrites its input, which nothing else reads: the value gives the slope. (The output of a linear layer that
        # is a view that autograd allows nothing to overwrite.)
        inplace = self.up.deferred is None
        h_BTF = F.relu(h_BTF, inplace=inplace) if self.activation == "relu" else F.gelu(h_BTF)
        if keys_B is not None:
            h_BTF = drop(h_BTF, keys_B, self.dropout, first_column=self.up.first_output)
        y_BTD: Tensor = self.down(h_BTF)
        return y_BTD


class _Block(ResidualBlock):
    attn: Attention
    mlp: FeedForward
    norm_1: nn.LayerNorm
    norm_2: nn.LayerNorm

    def __init__(self, shape: TransformerShape, *, decodes: bool) -> None:
        width, heads, bias, dropout = shape.hidden_dim, shape.num_heads, shape.bias, shape.dropout
        attn = Attention(width, (heads, heads), bias, dropout, causal=decodes and shape.causal)
        cross = {"cross": CrossAttention(width, heads, bias, dropout)} if decodes else {}
        norm, first = partial(nn.LayerNorm, width, bias=bias), shape.norm == "first"
        super().__init__(norm, dropout, norm_first=first, attn=attn, **cross, mlp=FeedForward(shape))


class EncoderBlock(_Block):
    """A layer of the encoder; the last one ends with the encoder's norm."""

    def __init__(self, shape: TransformerShape, *, last: bool) -> None:
        super().__init__(shape, decodes=False)
        self.norm_end = nn.LayerNorm(shape.hidden_dim, bias=shape.bias) if last else None

    def forward(
        self,
        x_BSD: Tensor,
        padding_BS: Tensor | None = None,
        keys_6B: Tensor | None = None,
        rows_S: Tensor | None = None,
    ) -> Tensor:
        """The source's stream after this layer.

        Args:
            x_BSD: the source's stream.
            padding_BS: bool, True at positions of the source that nobody sees.
            keys_6B: dropout keys of this layer's sites; None drops nothing.
            rows_S: the positions of x; None: all.
        """
        keys = _sites(keys_6B)
        x_BSD = self.residual(self.attn, self.norm_1, x_BSD, keys[1], rows_S, keys[0], padding_BS)
        x_BSD = self.residual(self.mlp, self.norm_2, x_BSD, keys[5], rows_S, keys[4])
        return x_BSD if self.norm_end is None else self.norm_end(x_BSD)


class DecoderBlock(_Block):
    """A layer of the decoder."""

    cross: CrossAttention
    norm_3: nn.LayerNorm

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__(shape, decodes=True)

    def forward(
        self,
        x_BTD: Tensor,
        source_BSD: Tensor,
        padding_BT: Tensor | None = None,
        padding_BS: Tensor | None = None,
        keys_6B: Tensor | None = None,
        rows_T: Tensor | None = None,
    ) -> Tensor:
        """The target's stream after this layer.

        Args:
            x_BTD: the target's stream.
            source_BSD: the encoder's output.
            padding_BT, padding_BS: bool, True at positions of target and source that nobody sees.
            keys_6B: dropout keys of this layer's sites; None drops nothing.
            rows_T: the positions of x; None: all.
        """
        keys = _sites(keys_6B)
        x_BTD = self.residual(self.attn, self.norm_1, x_BTD, keys[1], rows_T, keys[0], padding_BT)
        x_BTD = self.residual(self.cross, self.norm_2, x_BTD, keys[3], rows_T, source_BSD, padding_BS, keys[2])
        return self.residual(self.mlp, self.norm_3, x_BTD, keys[5], rows_T, keys[4])


def _sites(keys_6B: Tensor | None) -> tuple[Tensor | None, ...]:
    return (None,) * DROPOUT_SITES if keys_6B is None else keys_6B.unbind(0)
