"""In: inputs of encoder and decoder (tokens or vectors); in training also targets. Out: the summed loss; without
targets the logits or output vectors.
Does not contain optimizer or parallelism: strategies replace parameters by shards and set attributes of layers."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn

from codescent.models.part import Part, padding, with_gradient
from codescent.models.transformer.blocks import Layer
from codescent.models.transformer.declare import TransformerShape
from codescent.models.transformer.saved import DROPOUT_SITES
from codescent.operators.dropout import drop
from codescent.operators.linear import Linear
from codescent.operators.scaled_gradient import scaled_gradient
from codescent.operators.tables import Table

# Shapes: B samples, S positions of the source, T of the target, X = S + T, D hidden_dim, V vocab_size, L layers.


class Transformer(Part):
    """The encoder-decoder of Vaswani et al. 2017, "Attention Is All You Need", or a part of it. It is
    torch.nn.Transformer with embeddings and a head.

    One residual stream [B, X, D] goes through all depths, source rows first. So a part always sends one tensor to the
    next part. The encoder changes the source's rows. The decoder reads the source's rows and changes the target's rows.
    `tokens_T` and `rows_T` are positions in X.
    """

    block_sites = DROPOUT_SITES
    shape: TransformerShape

    def _build(self) -> None:
        shape, width = self.shape, self.shape.hidden_dim
        self.positions = Table(partial(sinusoids, max(shape.streams), width))
        self.tables = (self.positions,)
        self._counted, self._source_rows = self.rows_T, 0  # for `_rows_of_streams`
        if shape.embedding == "tied" and (self.embeds or self.ends):
            self.tok = nn.Embedding(shape.vocab_size, width)
        if shape.embedding == "untied" and self.embeds:
            self.source_tok = nn.Embedding(shape.vocab_size, width)
            self.target_tok = nn.Embedding(shape.vocab_size, width)
        self.blocks = nn.ModuleDict({str(layer): Layer(shape, layer) for layer in self.layers})
        if self.ends:
            self.norm = nn.LayerNorm(width, bias=shape.bias)
        if shape.embedding == "untied" and self.ends:
            self.head = Linear(width, shape.vocab_size, False)

    def forward(
        self,
        inputs: Tensor,
        targets_BX: Tensor | None = None,
        *,
        loss_scale: float = 1.0,
        source_lengths_B: Tensor | None = None,
        target_lengths_B: Tensor | None = None,
    ) -> Tensor:
        """See `Part`. The loss is a sum over the target's positions: of cross-entropies, or of squared errors.

        Args:
            inputs: tokens int64 [B, X] or activations; for a model without embeddings, vectors [B, X, D].
            targets_BX: int64; values at source positions are not read. Without embeddings, vectors [B, X, D].
            loss_scale: 1 / (target positions of the global batch).
            source_lengths_B, target_lengths_B: int64, at least 1; None: no padding. With `target_lengths_B`, negative
                targets have no loss.

        Returns:
            A scalar; or logits [B, T, V] or vectors [B, T, D]; activations [B, X, D].
        """
        x_BXD, tied_gradient_VD = inputs, None
        keys_SB = self.dropout_keys(len(inputs))
        if self.embeds and self.shape.embedding != "none":
            x_BXD, tied_gradient_VD = self._embed(inputs, tied=targets_BX is not None)
            if keys_SB is not None:
                x_BXD = drop(x_BXD, keys_SB[0], self.shape.dropout, self.rows_T)
        source_rows, _ = self._rows_of_streams(x_BXD)
        source_BSD, target_BTD = x_BXD[:, : len(source_rows)], x_BXD[:, len(source_rows) :]
        padding_BS = padding(source_lengths_B, self.shape.source_len)
        # The causal mask already hides the padding, which follows the target.
        padding_BT = None if self.shape.causal else padding(target_lengths_B, self.shape.target_len)
        source_BSD, target_BTD = self._layers(source_BSD, target_BTD, padding_BS, padding_BT, keys_SB)
        if not self.ends:
            return torch.cat((source_BSD, target_BTD), dim=1)
        target_BTD, skips = self.norm(target_BTD), target_lengths_B is not None
        targets_BT = None if targets_BX is None else targets_BX[:, self.shape.source_len :]
        if self.shape.embedding == "none":
            return target_BTD if targets_BT is None else squared_error(target_BTD, targets_BT, loss_scale)
        weight_VD = self.tok.weight if self.shape.embedding == "tied" else self.head.weight
        return self.predict(target_BTD, weight_VD, targets_BT, loss_scale, tied_gradient_VD, skip_negative=skips)

    def _layers(
        self,
        source_BSD: Tensor,
        target_BTD: Tensor,
        source_padding_BS: Tensor | None,
        target_padding_BT: Tensor | None,
        keys_SB: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Both streams after the layers of this part."""
        rows_S, rows_T = (None, None) if self.rows_T is None else self._rows_of_streams(source_BSD)
        for layer, block, keys_6B in self.each_block(keys_SB):
            if layer < self.shape.num_encoder_layers:
                source_BSD = block(source_BSD, source_padding_BS, keys_6B, rows_S)
            else:
                target_BTD = block(target_BTD, target_padding_BT, keys_6B, rows_T, source_BSD, source_padding_BS)
        return source_BSD, target_BTD

    def _embed(self, tokens_BX: Tensor, *, tied: bool) -> tuple[Tensor, Tensor | None]:
        """Token embeddings plus positions, and the receiver of a tied head's gradient (see `Part.embed`)."""
        source_BS, target_BT = tokens_BX[:, : self.shape.source_len], tokens_BX[:, self.shape.source_len :]
        if self.shape.embedding == "tied":
            x_BXD, tied_gradient_VD = self.embed(tokens_BX, tied=tied, head_tokens=target_BT.numel())
        else:
            source_BSD, _ = self.vocabulary.embed(self.source_tok.weight, source_BS, None)
            target_BTD, _ = self.vocabulary.embed(self.target_tok.weight, target_BT, None)
            x_BXD, tied_gradient_VD = with_gradient(torch.cat((source_BSD, target_BTD), dim=1)), None
        table = self.positions.on(x_BXD.device, x_BXD.dtype)
        positions_XD = torch.cat([table[rows] for rows in self._rows_of_streams(x_BXD)])
        return x_BXD * math.sqrt(self.shape.base_dim) + positions_XD, tied_gradient_VD

    def _rows_of_streams(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """The positions of source and target whose rows this rank holds. Each sequence counts from 0."""
        source_len = self.shape.source_len
        if self.rows_T is None:
            rows_X, source = torch.arange(like.shape[1], device=like.device), source_len
        else:
            if self._counted is not self.rows_T:  # once: on a device, reading the count waits
                self._counted, self._source_rows = self.rows_T, int((self.rows_T < source_len).sum())
            rows_X, source = self.rows_T.to(like.device), self._source_rows
        return rows_X[:source], rows_X[source:] - source_len


def sinusoids(length: int, width: int) -> Tensor:
    """fp64 [length, width]: at position p, channels 2i and 2i + 1 are sine and cosine of p / 10000^(2i / width)
    (Vaswani et al. 2017, section 3.5)."""
    rates_D = 10000.0 ** (-(torch.arange(width) // 2 * 2).double() / width)
    angles_TD = torch.arange(length)[:, None].double() * rates_D
    angles_TD[:, 0::2] = angles_TD[:, 0::2].sin()
    angles_TD[:, 1::2] = angles_TD[:, 1::2].cos()
    return angles_TD


def squared_error(y_BTD: Tensor, targets_BTD: Tensor, loss_scale: float) -> Tensor:
    """The sum over positions of the mean squared error over channels. Divided by the number of positions it is
    torch.nn.MSELoss. `loss_scale` multiplies the gradients, not the value."""
    wide = torch.promote_types(y_BTD.dtype, torch.float32)
    loss = (y_BTD.to(wide) - targets_BTD.to(wide)).square().sum() / y_BTD.shape[-1]
    return scaled_gradient(loss, loss_scale)
