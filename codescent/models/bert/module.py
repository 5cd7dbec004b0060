"""In: tokens [B, T], their segments, the samples' lengths; targets while training. Out: the summed loss, or logits.
Does not hold optimizer, device placement or parallelism: strategies wrap it from outside."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from codescent.models.bert.blocks import DROPOUT_SITES, BertBlock
from codescent.models.bert.declare import NORM_EPS, SEGMENTS, BertShape
from codescent.models.decoder import Decoder
from codescent.operators.dropout import drop
from codescent.operators.head import ScaledGradient
from codescent.operators.linear import Linear

# Shapes: B samples, T positions, N = B * T, M of these whose tokens are wanted, D hidden_dim, V vocab_size.


class MaskedHead(nn.Module):
    """What BERT makes of a row before the vocabulary matrix, and the bias of each entry of that."""

    def __init__(self, shape: BertShape, device: str) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(shape.vocab_size, device=device))
        self.dense = Linear(shape.hidden_dim, shape.hidden_dim, True, device)
        self.norm = nn.LayerNorm(shape.hidden_dim, NORM_EPS, device=device)

    def forward(self, x_MD: Tensor) -> Tensor:
        """Rows to multiply with the vocabulary's."""
        y_MD: Tensor = self.norm(F.gelu(self.dense(x_MD)))
        return y_MD


class Bert(Decoder):
    """BERT (Devlin et al. 2019) with one of its heads, or a part of it (see Decoder); the head "mlm" is tied to
    `tok.weight`. The pooler is left out: the prediction of the next sentence alone reads it."""

    shape: BertShape

    def __init__(
        self, shape: BertShape, head_chunk_tokens: int = 1024, device: str = "meta", depths: range | None = None
    ) -> None:
        super().__init__(shape, head_chunk_tokens, depths, DROPOUT_SITES)
        self.masked = shape.head == "mlm"
        # Built on meta and then moved: torch's modules would draw values here that are thrown away.
        if self.embeds or (self.ends and self.masked):
            self.tok = nn.Embedding(shape.vocab_size, shape.hidden_dim, device="meta")
        if self.embeds:
            self.pos = nn.Embedding(shape.seq_len, shape.hidden_dim, device="meta")
            self.segment = nn.Embedding(SEGMENTS, shape.hidden_dim, device="meta")
            self.embed_norm = nn.LayerNorm(shape.hidden_dim, NORM_EPS, device="meta")
        self.blocks = nn.ModuleDict({str(layer): BertBlock(shape, "meta") for layer in self.layers})
        if self.ends:
            self.head = MaskedHead(shape, "meta") if self.masked else Linear(shape.hidden_dim, 2, True, "meta")
        if device != "meta":
            self.to_empty(device=device)

    def forward(
        self,
        inputs: Tensor,
        targets: Tensor | None = None,
        *,
        loss_scale: float = 1.0,
        segments_BT: Tensor | None = None,
        lengths_B: Tensor | None = None,
    ) -> Tensor:
        """The sum of the losses where targets are given, else logits; of a part without the head, activations.

        Args:
            inputs: tokens int64 [B, T], T <= seq_len; of a part without the embedding, activations [B, T, D].
            targets: of the head "mlm" int64 [B, T]: the token that was masked, negative where nothing is wanted. Of the
                head "qa" int64 [B, 2]: the answer's first and last token; a token of its sample, which is not padding.
            loss_scale: factor on the gradients (not on the value).
            segments_BT: int64, 0 or 1; None: all are 0. The embedding reads them.
            lengths_B: int64, at least 1: what is behind so many positions is padding, which nobody sees; None: nothing.

        Returns:
            A scalar (fp32; fp64 in fp64): the sum over the masked tokens, or over the samples. Or logits [B, T, V] or
            [B, T, 2]; activations [B, T, D], those of padding without meaning.
        """
        x_BTD, port_VD = inputs, None
        keys_SB = self.site_keys(len(inputs))
        if self.embeds:
            x_BTD, port_VD = self.embed(inputs, tied=self.masked and targets is not None)
            x_BTD = x_BTD + self._segments(segments_BT, x_BTD.shape[1]) + self.here(self.pos.weight, x_BTD.shape[1])
            x_BTD = self.embed_norm(x_BTD)
            if keys_SB is not None:
                x_BTD = drop(x_BTD, keys_SB[0], self.shape.dropout, self.rows_T)
        # Between tensor-parallel layers there are some of the rows; inside, attention sees all.
        positions = x_BTD.shape[1] if self.rows_T is None else self.shape.seq_len
        padding_BT = None if lengths_B is None else _padding(lengths_B, positions)
        for name, block in self.blocks.items():
            first = 1 + int(name) * DROPOUT_SITES
            keys_3B = None if keys_SB is None else keys_SB[first : first + DROPOUT_SITES]
            x_BTD = block(x_BTD, padding_BT, keys_3B, self.rows_T)
        if not self.ends:
            return x_BTD
        if self.masked:
            return self._masked_tokens(x_BTD, targets, loss_scale, port_VD)
        logits_BT2 = self.vocabulary.every_logit(self.head(x_BTD))
        return logits_BT2 if targets is None else span_loss(logits_BT2, targets, lengths_B, loss_scale)

    def _segments(self, segments_BT: Tensor | None, rows: int) -> Tensor:
        """What is added to so many rows of the residual stream. As a product: the sums of its gradient are exact, and a
        look-up in so small a matrix would add one row after the other."""
        weight_2D = self.segment.weight
        if segments_BT is None:
            return weight_2D[0]
        here_BT = self.here(segments_BT.t(), rows).t()
        return F.one_hot(here_BT, SEGMENTS).to(weight_2D.dtype) @ weight_2D

    def _masked_tokens(
        self, x_BTD: Tensor, targets_BT: Tensor | None, loss_scale: float, port_VD: Tensor | None
    ) -> Tensor:
        """The sum of the losses, for which only the rows that are wanted are read on; or all logits."""
        head = self.head
        assert isinstance(head, MaskedHead)
        weight_VD, bias_V = self.tok.weight, head.bias
        x_BTD = self.vocabulary.every_row(x_BTD)
        if targets_BT is None:
            logits_BTV: Tensor = head(x_BTD) @ weight_VD.t() + bias_V
            return logits_BTV
        targets_N = targets_BT.flatten()
        wanted_M = (targets_N >= 0).nonzero().squeeze(1)
        x_MD = head(x_BTD.flatten(0, 1).index_select(0, wanted_M))
        loss: Tensor = self.vocabulary.loss_of_rows(
            x_MD, weight_VD, bias_V, targets_N[wanted_M], self.head_chunk_tokens, loss_scale, port_VD
        )
        return loss


def _padding(lengths_B: Tensor, positions: int) -> Tensor:
    """bool [B, positions], True behind each sample's length."""
    return torch.arange(positions, device=lengths_B.device) >= lengths_B[:, None]


def span_loss(logits_BT2: Tensor, targets_B2: Tensor, lengths_B: Tensor | None, loss_scale: float) -> Tensor:
    """SUM over samples of the mean of two cross-entropies: where the answer begins, and where it ends, of the sample's
    positions; gradients are multiplied by `loss_scale`, the value is not."""
    logits_B2T = logits_BT2.to(torch.promote_types(logits_BT2.dtype, torch.float32)).transpose(1, 2)
    if lengths_B is not None:
        padding_B1T = _padding(lengths_B, logits_B2T.shape[2])[:, None]
        logits_B2T = logits_B2T.masked_fill(padding_B1T, -math.inf)
    loss = F.cross_entropy(logits_B2T.flatten(0, 1), targets_B2.flatten(), reduction="sum") / 2
    scaled: Tensor = ScaledGradient.apply(loss, loss_scale)  # type: ignore[no-untyped-call]
    return scaled
