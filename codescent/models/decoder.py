"""In: tokens, or a previous pipeline stage's activations. Out: activations; after the last stage logits or summed loss.
Does not build layers: GPT-2 and Llama are subclasses of `Decoder` and build their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from codescent.models.part import Part
from codescent.models.saved_blocks import DROPOUT_SITES
from codescent.operators.cache import Cache, LayerCache
from codescent.operators.documents import DocumentBounds
from codescent.operators.dropout import drop
from codescent.operators.policy import WrittenAnswers
from codescent.operators.preferences import ComparedAnswers
from codescent.operators.routing import attached
from codescent.operators.tables import Table

# Shapes: B samples, T positions, D hidden_dim, V vocab_size; C = head_dim / 2 of rotary positions; M documents of a
# sample, N of all samples; K spans of a sample, A or G answers of it.


class ResidualBlock(nn.Module):
    """One layer: named parts, each with a residual connection and a norm.

    The norm is before the part (`norm_first`), of its output before the sum (`norm_output`), or after the sum. With
    both a part has two norms. `norm` builds the norms norm_1, norm_2, and so on, and the second ones, norm_1_out and so
    on. `dropout` is the dropout probability of a part's output.
    """

    def __init__(
        self,
        norm: Callable[[], nn.Module],
        dropout: float,
        *,
        norm_first: bool,
        norm_output: bool = False,
        **parts: nn.Module,
    ) -> None:
        super().__init__()
        self.dropout, self.norm_first, self.norm_output = dropout, norm_first, norm_output
        for number, (name, part) in enumerate(parts.items(), start=1):
            own = (f"norm_{number}", norm())
            members = [own, (name, part)] if norm_first else [(name, part), own]  # in the order of the forward pass
            members += [(f"norm_{number}_out", norm())] if norm_first and norm_output else []
            for member, module in members:
                self.add_module(member, module)

    def residual(
        self,
        part: nn.Module,
        norm: nn.Module,
        x_BTD: Tensor,
        keys_B: Tensor | None,
        rows_T: Tensor | None,
        *reads: object,
        last: nn.Module | None = None,
    ) -> Tensor:
        """The residual stream after a part: [B, T, D].

        x + part(norm(x)) if norm_first; x + norm(part(x)) if norm_output; else norm(x + part(x)). `reads`: what part
        reads beside. `last`: the second norm of a part that has two.
        `keys_B`: dropout keys for the part's output; None: no dropout. `rows_T`: positions of the rows of x; None: all.
        """
        y_BTD = part(norm(x_BTD), *reads) if self.norm_first else part(x_BTD, *reads)
        if keys_B is not None:
            y_BTD = drop(y_BTD, keys_B, self.dropout, rows_T)
        if self.norm_output:
            y_BTD = (norm if last is None else last)(y_BTD)
        sum_BTD: Tensor = x_BTD + y_BTD
        return sum_BTD if self.norm_first or self.norm_output else norm(sum_BTD)


class Block(ResidualBlock):
    """Self-attention, then a feed-forward."""

    SITES = DROPOUT_SITES
    attn: nn.Module
    mlp: nn.Module
    norm_1: nn.Module
    norm_2: nn.Module
    norm_1_out: nn.Module
    norm_2_out: nn.Module

    def forward(
        self,
        x_BTD: Tensor,
        keys_3B: Tensor | None = None,
        rows_T: Tensor | None = None,
        padding_BT: Tensor | None = None,
        cache: LayerCache | None = None,
        turns_TC2: Tensor | None = None,
        begins_BT: Tensor | None = None,
        offsets_N: Tensor | None = None,
    ) -> Tensor:
        """The residual stream x after this layer.

        `keys_3B`: dropout keys of the three sites; None: no dropout. `rows_T`: positions of the rows of x; None: all.
        The other arguments are those of `Attention.forward`; of its documents both tensors.
        """
        documents = None if begins_BT is None else DocumentBounds(begins_BT, offsets_N)
        keys = (None,) * self.SITES if keys_3B is None else keys_3B.unbind(0)
        lasts = (self.norm_1_out, self.norm_2_out) if self.norm_first and self.norm_output else (None, None)
        reads = keys[0], padding_BT, cache, turns_TC2, documents
        x_BTD = self.residual(self.attn, self.norm_1, x_BTD, keys[1], rows_T, *reads, last=lasts[0])
        return self.residual(self.mlp, self.norm_2, x_BTD, keys[2], rows_T, last=lasts[1])


class Decoder(Part):
    """A decoder-only language model, or the part of it on one virtual pipeline stage.

    `pos` None: this part has no learned positions. `ties_head`: the head reads `tok.weight`, else `head.weight`.
    `embedding_scale`: a factor on the embeddings of tokens; None: there is none.
    """

    pos: nn.Embedding | None
    ties_head = True
    embedding_scale: Table | None = None
    head: nn.Linear

    def angles(
        self, inputs: Tensor, positions_BT: Tensor | None, dtype: torch.dtype, documents: DocumentBounds | None = None
    ) -> Sequence[Tensor | None]:
        """Rotary angles for attention of each block of this part; None: no rotation.

        `positions_BT`: positions of the inputs, with a cache. `documents`: their positions begin again at each.
        """
        return [None] * len(self.layers)

    def scaled(self, x_BTD: Tensor) -> Tensor:
        """Embeddings times `embedding_scale`, which is rounded to their dtype, as models were trained that have one."""
        return x_BTD if self.embedding_scale is None else x_BTD * self.embedding_scale.on(x_BTD.device, x_BTD.dtype)

    def ahead(
        self,
        x_BTD: Tensor,
        inputs_BT: Tensor,
        targets_BT: Tensor,
        weight_VD: Tensor,
        loss_scale: float,
        angles: Sequence[Tensor | None],
        documents: DocumentBounds | None,
    ) -> Tensor | None:
        """The summed loss of tokens behind the next one, with a scaled gradient; None: no module predicts them.

        `x_BTD`: the states that the head reads. `inputs_BT`, `targets_BT`: of whole samples.
        """
        return None

    def forward(
        self,
        inputs: Tensor,
        targets_BT: Tensor | None = None,
        cache: Cache | None = None,
        *,
        loss_scale: float = 1.0,
        lengths_B: Tensor | None = None,
        begins_BT: Tensor | None = None,
        ends_BM: Tensor | None = None,
        wanted_N: Tensor | None = None,
        spans_BT: Tensor | None = None,
        references_BK: Tensor | None = None,
        wanted_BA: Tensor | None = None,
        rewards_BG: Tensor | None = None,
        cut_BG: Tensor | None = None,
        old_BT: Tensor | None = None,
        reference_BT: Tensor | None = None,
    ) -> Tensor:
        """See `Part`.

        Args:
            inputs: tokens int64 [B, T], or activations.
            targets_BT: int64: the next token at each position. With `lengths_B` or documents, a negative target has no
                loss.
            cache: key/value cache of earlier tokens. With a cache, the tokens are [1, N]: those of all texts, one text
                behind the other. The logits [B, V] are of the tokens that the cache wants.
            loss_scale: 1 / (target tokens of the global batch).
            lengths_B: tokens of each sample before the padding; None: no padding. The causal mask hides the padding.
            begins_BT, ends_BM: the documents of each sample (see `data.documents`): positions begin again at each, and
                no token sees another document. None: a sample is one document.
            wanted_N: without targets and cache: the tokens whose logits [N, V] are wanted, as indices in B * T; None:
                all, [B, T, V].
            spans_BT, references_BK, wanted_BA: the answers that are compared (`operators.preferences.ComparedAnswers`).
                None: every target is learned.
            rewards_BG, cut_BG, old_BT, reference_BT: of answers that the model has written
                (`operators.policy.WrittenAnswers`), where the objective is a policy.
        """
        documents = None if begins_BT is None or ends_BM is None else DocumentBounds.of(begins_BT, ends_BM)
        x_BTD, tied_gradient_VD, positions_BT = inputs, None, None
        keys_SB = self.dropout_keys(len(inputs))
        if cache is not None:
            positions_BT = cache.positions_1N
            x_BTD = self.scaled(self.vocabulary.embed(self.tok.weight, inputs, None)[0])
            if self.pos is not None:
                x_BTD = x_BTD + self.pos(positions_BT)
        elif self.embeds:
            x_BTD, tied_gradient_VD = self.embed(inputs, tied=self.ties_head and targets_BT is not None)
            x_BTD = self.scaled(x_BTD)
            if self.pos is not None and documents is not None:
                x_BTD = x_BTD + self.pos(self.select_places(documents.positions_BT, self.rows_T))
            elif self.pos is not None:
                x_BTD = x_BTD + self.select_rows(self.pos.weight, x_BTD.shape[1])
        angles = self.angles(inputs, positions_BT, x_BTD.dtype, documents)
        if self.embeds and keys_SB is not None:
            x_BTD = drop(x_BTD, keys_SB[0], self.shape.dropout, self.rows_T)
        for (layer, block, keys_3B), turns_TC2 in zip(self.each_block(keys_SB), angles, strict=True):
            layer_cache = None if cache is None else cache.layers[layer]
            x_BTD = block(x_BTD, keys_3B, self.rows_T, None, layer_cache, turns_TC2, *(documents or ()))
        if not self.ends:
            return x_BTD
        if cache is not None:
            x_BTD = cache.wanted(x_BTD)
        elif wanted_N is not None:
            x_BTD = x_BTD.flatten(0, 1)[wanted_N]
        x_BTD, weight_VD = self.norm(x_BTD), self.tok.weight if self.ties_head else self.head.weight
        ahead = None
        if targets_BT is not None:
            if self.training and self.objective.mtp_weight and spans_BT is None:
                ahead = self.ahead(x_BTD, inputs, targets_BT, weight_VD, loss_scale, angles, documents)
            targets_BT = self.select_tokens(targets_BT)
        if targets_BT is not None and spans_BT is not None and self.objective.policy is not None:
            written = WrittenAnswers(spans_BT, rewards_BG, cut_BG, old_BT, reference_BT)
            return self.reinforce(x_BTD, weight_VD, targets_BT, written, loss_scale, tied_gradient_VD)
        if targets_BT is not None and spans_BT is not None:
            answers = ComparedAnswers(spans_BT, references_BK, wanted_BA)
            return self.compare(x_BTD, weight_VD, targets_BT, answers, loss_scale, tied_gradient_VD)
        skips = lengths_B is not None or documents is not None
        loss = self.predict(x_BTD, weight_VD, targets_BT, loss_scale, tied_gradient_VD, skip_negative=skips)
        return loss if ahead is None else attached(loss, ahead)
