"""In: tokens [B, T], their segments, the samples' lengths; in training also targets. Out: the summed loss, or logits.
Does not contain optimizer or parallelism: strategies replace parameters by shards and set attributes of layers."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from codescent.models.bert.declare import NORM_EPS, SEGMENTS, BertShape
from codescent.models.decoder import Block
from codescent.models.part import Part, padding
from codescent.operators import products
from codescent.operators.activations import EXACT_GELU, feed_forward
from codescent.operators.attention import Attention
from codescent.operators.block_attention import ScoreTraits
from codescent.operators.compiled import never_compiled
from codescent.operators.dropout import drop
from codescent.operators.head import Vocabulary
from codescent.operators.linear import Linear
from codescent.operators.scaled_gradient import scaled_gradient
from codescent.plan.objective import CROSS_ENTROPY, Objective

# Shapes: B samples, T positions, N = B * T, M positions with a target, D hidden_dim, V vocab_size.


class MaskedHead(nn.Module):
    """The layers of the head "mlm" before the vocabulary matrix, and the bias of its logits."""

    def __init__(self, width: int, vocab_size: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(vocab_size))
        self.dense = Linear(width, width, True)
        self.norm = nn.LayerNorm(width, NORM_EPS)

    def forward(self, x_MD: Tensor) -> Tensor:
        """[M, D]: rows to multiply with the vocabulary matrix."""
        y_MD: Tensor = self.norm(F.gelu(self.dense(x_MD)))
        return y_MD


class Bert(Part):
    """BERT (Devlin et al. 2019) with one of its heads, or a part of it; the head "mlm" is tied to `tok.weight`.

    A block is norm_1(x + attn(x)), then norm_2(x + mlp(x)). There is no pooler: only next-sentence prediction reads it.
    """

    block_sites = Block.SITES
    shape: BertShape

    def _build(self) -> None:
        shape, width = self.shape, self.shape.hidden_dim
        self.masked = shape.head == "mlm"
        if self.embeds or (self.ends and self.masked):
            self.tok = nn.Embedding(shape.vocab_size, width)
        if self.embeds:
            self.pos = nn.Embedding(shape.seq_len, width)
            self.segment = nn.Embedding(SEGMENTS, width)
            self.embed_norm = nn.LayerNorm(width, NORM_EPS)
        self.blocks = nn.ModuleDict({str(layer): self._block() for layer in self.layers})
        if self.ends:
            self.head = MaskedHead(width, shape.vocab_size) if self.masked else Linear(width, 2, True)

    def _block(self) -> Block:
        shape, width = self.shape, self.shape.hidden_dim
        heads, scores = (shape.num_heads, shape.num_kv_heads), ScoreTraits(width=shape.score_width)
        attn = Attention(width, heads, True, shape.dropout, causal=False, scores=scores)
        mlp = feed_forward(width, shape.ffn_dim, True, EXACT_GELU)
        norm = partial(nn.LayerNorm, width, NORM_EPS)
        return Block(norm, shape.dropout, norm_first=False, attn=attn, mlp=mlp)

    def forward(
        self,
        inputs: Tensor,
        targets: Tensor | None = None,
        *,
        loss_scale: float = 1.0,
        segments_BT: Tensor | None = None,
        lengths_B: Tensor | None = None,
    ) -> Tensor:
        """See `Part`. The loss is summed over the masked tokens ("mlm") or over the samples ("qa").

        Args:
            inputs: tokens int64 [B, T], or activations.
            targets: int64. Head "mlm": [B, T], the token that was masked; a negative target has no loss. Head "qa":
                [B, 2], the positions of the answer's first and last token in its sample; not in the padding.
            loss_scale: factor on the gradients.
            segments_BT: int64, 0 or 1; None: all are 0. The embedding reads them.
            lengths_B: int64, at least 1: tokens of each sample before the padding. No position sees the padding. None:
                no padding.

        Returns:
            A scalar; or logits [B, T, V] or [B, T, 2]; or activations [B, T, D], meaningless at padding.
        """
        x_BTD, tied_gradient_VD = inputs, None
        keys_SB = self.dropout_keys(len(inputs))
        if self.embeds:
            x_BTD, tied_gradient_VD = self.embed(inputs, tied=self.masked and targets is not None)
            rows = x_BTD.shape[1]
            x_BTD = x_BTD + self._segments(segments_BT, rows) + self.select_rows(self.pos.weight, rows)
            x_BTD = self.embed_norm(x_BTD)
            if keys_SB is not None:
                x_BTD = drop(x_BTD, keys_SB[0], self.shape.dropout, self.rows_T)
        # With sequence parallelism a rank holds only some of the rows between layers, but attention reads all rows.
        positions = x_BTD.shape[1] if self.rows_T is None else self.shape.seq_len
        padding_BT = padding(lengths_B, positions)
        for _, block, keys_3B in self.each_block(keys_SB):
            x_BTD = block(x_BTD, keys_3B, self.rows_T, padding_BT)
        if not self.ends:
            return x_BTD
        if self.masked:
            return self._masked_tokens(x_BTD, targets, loss_scale, tied_gradient_VD)
        logits_BT2 = self.vocabulary.every_logit(self.head(x_BTD))
        if targets is None:
            return logits_BT2
        return span_loss(logits_BT2, targets, lengths_B, loss_scale, self.current_objective)

    def _segments(self, segments_BT: Tensor | None, rows: int) -> Tensor:
        """The segment embeddings of the rows that this rank holds.

        A product with one-hot rows sums its gradient exactly. A look-up in so small a matrix would add row after row.
        """
        weight_2D = self.segment.weight
        if segments_BT is None:
            return weight_2D[0]
        own_BT = self.select_rows(segments_BT.t(), rows).t()
        return products.matmul(F.one_hot(own_BT, SEGMENTS).to(weight_2D.dtype), weight_2D)

    def _masked_tokens(
        self, x_BTD: Tensor, targets_BT: Tensor | None, loss_scale: float, tied_gradient_VD: Tensor | None
    ) -> Tensor:
        """The summed loss, computed only for the rows with a target; without targets, the logits of all rows."""
        head = self.head
        assert isinstance(head, MaskedHead)
        weight_VD, bias_V = self.tok.weight, head.bias
        x_BTD = self.vocabulary.every_row(x_BTD)
        if targets_BT is None:
            logits_BTV: Tensor = products.linear(self.for_head(head(x_BTD)), weight_VD) + bias_V
            return logits_BTV
        rows_M, targets_M, too_many = rows_with_target(targets_BT, self.losses_per_sample)
        x_MD = self.for_head(head(x_BTD.flatten(0, 1).index_select(0, rows_M)))
        loss: Tensor = loss_of_rows(
            self.vocabulary,
            x_MD,
            weight_VD,
            bias_V,
            targets_M,
            self.head_chunk_tokens,
            loss_scale,
            tied_gradient_VD,
            self.current_objective,
            skip_negative=too_many is not None,
        )
        return loss if too_many is None else loss.masked_fill(too_many, math.nan)


@never_compiled
def loss_of_rows(vocabulary: Vocabulary, *arguments: Any, **options: Any) -> Tensor:
    """See `Vocabulary.loss_of_rows`. The number of rows depends on the data, so this is never compiled."""
    loss: Tensor = vocabulary.loss_of_rows(*arguments, **options)
    return loss


def rows_with_target(targets_BT: Tensor, each: int | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The rows whose target is not negative, as indices [M] in B * T, and their targets.

    Off the CPU, M is known only when the device has counted the targets, and the host would wait. So there
    `as_many_rows` selects them, if every sample has `each` targets. Third result: see there; None: all are selected.
    """
    if each is not None and targets_BT.device.type != "cpu":
        return as_many_rows(targets_BT, each)
    targets_N = targets_BT.flatten()
    rows_M = (targets_N >= 0).nonzero().squeeze(1)
    return rows_M, targets_N[rows_M], None


def as_many_rows(targets_BT: Tensor, each: int) -> tuple[Tensor, Tensor, Tensor]:
    """`rows_with_target`, with an M that does not depend on the targets: `each` of every sample.

    If there are fewer targets, the last rows are row 0 with a negative target. The third result, a bool on the device,
    says that there are more targets, and not all are selected.
    """
    targets_N, most = targets_BT.flatten(), len(targets_BT) * each
    has_target_N = targets_N >= 0
    found_M = torch.nonzero_static(has_target_N, size=most).squeeze(1)
    rows_M = found_M.clamp(min=0)
    return rows_M, torch.where(found_M < 0, -1, targets_N[rows_M]), has_target_N.sum() > most


def span_loss(
    logits_BT2: Tensor,
    targets_B2: Tensor,
    lengths_B: Tensor | None,
    loss_scale: float,
    objective: Objective = CROSS_ENTROPY,
) -> Tensor:
    """The sum over samples of the mean of two losses: of the answer's first and last position.

    The classes are the positions of the sample, without the padding. `loss_scale` multiplies the gradients, not the
    value.
    """
    logits_B2T = logits_BT2.to(torch.promote_types(logits_BT2.dtype, torch.float32)).transpose(1, 2)
    padding_BT = padding(lengths_B, logits_B2T.shape[2])
    if padding_BT is not None:
        logits_B2T = logits_B2T.masked_fill(padding_BT[:, None], -math.inf)
    loss = F.cross_entropy(logits_B2T.flatten(0, 1), targets_B2.flatten(), reduction="sum")
    if smoothing := objective.label_smoothing:
        # torch's own label smoothing would also count the padding, whose log(p) is -inf.
        log_p_B2T = torch.log_softmax(logits_B2T, -1)
        if padding_BT is not None:
            log_p_B2T = log_p_B2T.masked_fill(padding_BT[:, None], 0.0)
        positions_B1 = logits_B2T.shape[2] if lengths_B is None else lengths_B[:, None]
        loss = (1.0 - smoothing) * loss - smoothing * (log_p_B2T.sum(-1) / positions_B1).sum()
    if objective.z_loss:
        loss = loss + objective.z_loss * torch.logsumexp(logits_B2T, -1).square().sum()
    return scaled_gradient(loss / 2, loss_scale)
