"""In: activations of one layer. Out: those of the next: a layer of the encoder, a layer of the decoder.
Does not know tokens, losses or other layers."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from codescent.models.transformer.attention import CrossAttention, SelfAttention
from codescent.models.transformer.declare import TransformerShape
from codescent.operators.dropout import drop, dropped_at
from codescent.operators.linear import Linear

# Shapes: B batch, S positions of the source, T of the target, D hidden_dim, F ffn_dim.
DROPOUT_SITES = 6  # in a block: probabilities and what attention adds, twice; inside the feed-forward, what it adds


class FeedForward(nn.Module):
    """Linear, ReLU or GELU, dropout, linear."""

    def __init__(self, shape: TransformerShape, device: str) -> None:
        super().__init__()
        self.dropout, self.activation = shape.dropout, shape.activation
        self.up = Linear(shape.hidden_dim, shape.ffn_dim, shape.bias, device)
        self.down = Linear(shape.ffn_dim, shape.hidden_dim, shape.bias, device)

    def forward(self, x_BTD: Tensor, keys_B: Tensor | None = None) -> Tensor:
        """[B, T, D]; `keys_B` are keys of the dropout between the two matrices, None drops nothing."""
        h_BTF = self.up(x_BTD)
        # ReLU in the memory of its input, which nobody else reads: its slope is known by its value. (What puts products
        # off is a Function of ours, and autograd allows nobody to write into the view that it returns.)
        inplace = self.up.later is None
        h_BTF = F.relu(h_BTF, inplace=inplace) if self.activation == "relu" else F.gelu(h_BTF)
        if keys_B is not None:
            _, length, width = h_BTF.shape
            rows_T = torch.arange(length, device=keys_B.device)
            first = self.up.first_output
            columns_F = torch.arange(first, first + width, dtype=torch.int32, device=keys_B.device)
            dropped = dropped_at(keys_B, rows_T, columns_F, self.dropout)
            h_BTF = h_BTF.masked_fill(dropped, 0.0) * (1.0 / (1.0 - self.dropout))
        y_BTD: Tensor = self.down(h_BTF)
        return y_BTD


class _Block(nn.Module):
    """What both kinds of layers are made of: parts, each with a sum around it and a norm after it or before it."""

    attn: SelfAttention
    mlp: FeedForward
    norm_1: nn.LayerNorm
    norm_2: nn.LayerNorm

    def __init__(self, shape: TransformerShape, device: str, **parts: nn.Module) -> None:
        super().__init__()
        self.dropout, self.norm_first = shape.dropout, shape.norm == "first"
        for number, (name, part) in enumerate(parts.items(), start=1):
            norm = nn.LayerNorm(shape.hidden_dim, bias=shape.bias, device=device)
            members = [(name, part), (f"norm_{number}", norm)]
            for member, module in reversed(members) if self.norm_first else members:  # in the order of reading
                self.add_module(member, module)

    def _around(
        self,
        part: Callable[[Tensor], Tensor],
        norm: nn.Module,
        x_BTD: Tensor,
        keys_B: Tensor | None,
        rows_T: Tensor | None,
    ) -> Tensor:
        """norm(x + part(x)), or x + part(norm(x)); what the part adds is dropped by these keys, if any."""
        y_BTD = part(norm(x_BTD)) if self.norm_first else part(x_BTD)
        if keys_B is not None:
            y_BTD = drop(y_BTD, keys_B, self.dropout, rows_T)
        sum_BTD: Tensor = x_BTD + y_BTD
        return sum_BTD if self.norm_first else norm(sum_BTD)


class EncoderBlock(_Block):
    """A layer of the encoder; the last one ends with the encoder's norm."""

    def __init__(self, shape: TransformerShape, device: str, *, last: bool) -> None:
        super().__init__(shape, device, attn=SelfAttention(shape, False, device), mlp=FeedForward(shape, device))
        self.norm_end = nn.LayerNorm(shape.hidden_dim, bias=shape.bias, device=device) if last else None

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
            keys_6B: dropout keys of this layer's DROPOUT_SITES; None drops nothing.
            rows_S: the positions that x is of; None: all.
        """
        keys = _sites(keys_6B)
        x_BSD = self._around(lambda x: self.attn(x, padding_BS, keys[0]), self.norm_1, x_BSD, keys[1], rows_S)
        x_BSD = self._around(lambda x: self.mlp(x, keys[4]), self.norm_2, x_BSD, keys[5], rows_S)
        return x_BSD if self.norm_end is None else self.norm_end(x_BSD)


class DecoderBlock(_Block):
    """A layer of the decoder."""

    cross: CrossAttention
    norm_3: nn.LayerNorm

    def __init__(self, shape: TransformerShape, device: str) -> None:
        attn, cross = SelfAttention(shape, shape.causal, device), CrossAttention(shape, device)
        super().__init__(shape, device, attn=attn, cross=cross, mlp=FeedForward(shape, device))

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
            source_BSD: what the encoder has made of the source.
            padding_BT, padding_BS: bool, True at positions of target and source that nobody sees.
            keys_6B: dropout keys of this layer's DROPOUT_SITES; None drops nothing.
            rows_T: the positions that x is of; None: all.
        """
        keys = _sites(keys_6B)
        x_BTD = self._around(lambda x: self.attn(x, padding_BT, keys[0]), self.norm_1, x_BTD, keys[1], rows_T)
        x_BTD = self._around(
            lambda x: self.cross(x, source_BSD, padding_BS, keys[2]), self.norm_2, x_BTD, keys[3], rows_T
        )
        return self._around(lambda x: self.mlp(x, keys[4]), self.norm_3, x_BTD, keys[5], rows_T)


def _sites(keys_6B: Tensor | None) -> tuple[Tensor | None, ...]:
    return (None,) * DROPOUT_SITES if keys_6B is None else keys_6B.unbind(0)
