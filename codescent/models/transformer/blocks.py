"""In: activations before a layer; for a decoder layer also the encoder's output. Out: activations after the layer.
Does not read tokens and does not compute a loss."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from codescent.models.decoder import ResidualBlock
from codescent.models.transformer.declare import TransformerShape
from codescent.models.transformer.saved import DROPOUT_SITES
from codescent.operators.attention import Attention, CrossAttention
from codescent.operators.block_attention import ScoreTraits
from codescent.operators.dropout import drop
from codescent.operators.kept import keeping
from codescent.operators.linear import Linear

# Shapes: B batch, S positions of the source, T of the target, D hidden_dim, F ffn_dim.


class FeedForward(nn.Module):
    """Linear, ReLU or GELU, dropout, linear."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.dropout, self.activation = shape.dropout, shape.activation
        self.up = Linear(shape.hidden_dim, shape.ffn_dim, shape.bias)
        self.down = Linear(shape.ffn_dim, shape.hidden_dim, shape.bias)

    def forward(self, x_BTD: Tensor, keys_B: Tensor | None = None) -> Tensor:
        """[B, T, D]. `keys_B`: keys of the dropout between the two matrices; None: no dropout."""
        h_BTF = self.up(x_BTD)
        # ReLU may overwrite its input, because backward needs only its output. If `up` defers its weight gradient,
        # autograd does not allow to overwrite its output; nor may it be overwritten if recompute keeps it.
        inplace = self.up.deferred is None and not keeping()
        h_BTF = F.relu(h_BTF, inplace=inplace) if self.activation == "relu" else F.gelu(h_BTF)
        if keys_B is not None:
            h_BTF = drop(h_BTF, keys_B, self.dropout, first_column=self.up.first_output)
        y_BTD: Tensor = self.down(h_BTF)
        return y_BTD


class Layer(ResidualBlock):
    """A layer of the encoder, or of the decoder with cross-attention. The last encoder layer ends with a norm."""

    attn: Attention
    cross: CrossAttention
    mlp: FeedForward
    norm_1: nn.LayerNorm
    norm_2: nn.LayerNorm
    norm_3: nn.LayerNorm

    def __init__(self, shape: TransformerShape, number: int) -> None:
        decodes, first = number >= shape.num_encoder_layers, shape.norm == "first"
        width, heads, bias, dropout = shape.hidden_dim, shape.num_heads, shape.bias, shape.dropout
        scores = ScoreTraits(width=shape.score_width)
        attn = Attention(width, (heads, heads), bias, dropout, causal=decodes and shape.causal, scores=scores)
        cross: dict[str, Any] = {"cross": CrossAttention(width, heads, bias, dropout, scores=scores)} if decodes else {}
        norm = partial(nn.LayerNorm, width, bias=bias)
        super().__init__(norm, dropout, norm_first=first, attn=attn, **cross, mlp=FeedForward(shape))
        self.decodes = decodes
        self.norm_end = norm() if number == shape.num_encoder_layers - 1 else None

    def forward(
        self,
        x_BTD: Tensor,
        padding_BT: Tensor | None = None,
        keys_6B: Tensor | None = None,
        rows_T: Tensor | None = None,
        source_BSD: Tensor | None = None,
        padding_BS: Tensor | None = None,
    ) -> Tensor:
        """The residual stream after this layer: of the source in the encoder, of the target in the decoder.

        Args:
            x_BTD: the residual stream before this layer.
            padding_BT: bool, True at padding of x, which no query attends to; None: no padding.
            keys_6B: dropout keys of this layer's sites; None: no dropout.
            rows_T: the positions of x; None: all.
            source_BSD: in the decoder, the encoder's output.
            padding_BS: in the decoder, as `padding_BT`, for the source.
        """
        keys = (None,) * DROPOUT_SITES if keys_6B is None else keys_6B.unbind(0)
        x_BTD = self.residual(self.attn, self.norm_1, x_BTD, keys[1], rows_T, keys[0], padding_BT)
        if self.decodes:
            x_BTD = self.residual(self.cross, self.norm_2, x_BTD, keys[3], rows_T, source_BSD, padding_BS, keys[2])
        last_norm = self.norm_3 if self.decodes else self.norm_2
        x_BTD = self.residual(self.mlp, last_norm, x_BTD, keys[5], rows_T, keys[4])
        return x_BTD if self.norm_end is None else self.norm_end(x_BTD)
