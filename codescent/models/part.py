"""In: a model's sizes, and which layers to build (embedding, blocks, head). Out: `Part`, the base class of the
modules of all kinds of model. It has what all kinds share: embedding, head, random numbers for dropout.
Does not run the blocks: the `forward` of each kind of model runs them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from codescent.base.unfilled import Unfilled
from codescent.models.shape import Shape
from codescent.operators.dropout import mix, sample_keys, site_keys
from codescent.operators.experts import Router
from codescent.operators.head import Vocabulary
from codescent.operators.linear import Deferred, Linear
from codescent.operators.policy import WrittenAnswers, policy_loss
from codescent.operators.preferences import ComparedAnswers, WholeSamples, compared, sums_of
from codescent.operators.soft_cap import capped
from codescent.operators.tables import Table
from codescent.plan.objective import CROSS_ENTROPY, Objective

# Shapes: B samples, T positions, D hidden_dim, V vocab_size; S dropout sites, places of a model that drop activations:
# one before the first block, then those of each block.


class Part(nn.Module):
    """A model, or the part of it on one virtual pipeline stage.

    A part with the embedding takes tokens int64 [B, T], T <= seq_len; a part without it takes activations [B, T, D].
    A part without the head returns activations [B, T, D]. A part with the head returns logits [B, T, V]. With targets
    it returns the sum of the losses instead: a scalar in fp32 (in fp64 for activations in fp64). `loss_scale` is a
    factor on the gradients, not on the value.

    Args:
        shape: sizes of the whole model.
        head_chunk_tokens: rows of logits in memory at a time in training; 0: all.
        device: device of the parameters. Their values are not set.
        depths: what to build: 0 the embedding, 1 to num_layers the blocks, num_layers + 1 the head; None: all.

    Attributes:
        block_sites: number of dropout sites of a block.
        embeds, ends: whether the part has the embedding, and the head.
        layers: numbers of its blocks.
        blocks: its blocks, by their number in the whole model. Each can be compiled or sharded by itself.
        tok: the vocabulary matrix of the embedding. A tied head reads it, too.
        norm: the norm before the head.
        head_factor: see `for_head`.
        objective: what training minimises. In evaluation mode the losses are plain cross-entropies, or preferences.
        objective_sums: of the last pass with preferences: the sums of its measures, each with how many there are,
            [Q, 2].
        vocabulary: computes the embedding and the loss from the vocabulary matrix.
        sample_sums: adds what ranks have computed of other positions of the same samples.
        tokens_T: the positions of each sample whose tokens this rank reads; None: all.
        rows_T: the positions of each sample whose rows are in the residual stream of this rank; None: all.
        losses_per_sample: number of losses of every sample; None: it varies, or nobody has said it.
        deferred: weight gradients that backward has deferred; None: backward computes all gradients at once.
        routers: the routers of its layers of experts, by the number of the layer.
        measured: what strategies have measured in the last step, by metrics column: of all ranks, on the device.
        drops_of_adapters: the layers of the whole model whose adapters have dropout; None: of another part.
        adapter_keys_SB: the keys of these adapters, of the micro-batch of the last forward pass; None: there are none.
        tables: what its forward reads beside parameters, such as the frequencies of rotary positions.
    """

    block_sites = 0
    shape: Shape
    blocks: nn.ModuleDict
    tok: nn.Embedding
    norm: nn.Module
    tables: tuple[Table, ...] = ()
    routers: Mapping[int, Router] = {}

    def __init__(
        self, shape: Shape, head_chunk_tokens: int = 1024, device: str = "meta", depths: range | None = None
    ) -> None:
        super().__init__()
        depths = range(shape.num_layers + 2) if depths is None else depths
        self.shape, self.head_chunk_tokens = shape, head_chunk_tokens
        self.embeds, self.ends = 0 in depths, shape.num_layers + 1 in depths
        self.layers = [depth - 1 for depth in depths if 1 <= depth <= shape.num_layers]
        self.head_factor = 1.0 / shape.growth.width
        self.objective = CROSS_ENTROPY
        self.objective_sums: Tensor | None = None
        self.vocabulary = Vocabulary()
        self.sample_sums = WholeSamples()
        self.tokens_T: Tensor | None = None
        self.rows_T: Tensor | None = None
        self.losses_per_sample: int | None = None
        self.deferred: Deferred | None = None
        self.measured: Mapping[str, Tensor] = {}
        self.drops_of_adapters: tuple[Linear | None, ...] = ()
        self.adapter_keys_SB: Tensor | None = None
        self._dropout_keys_SB: Tensor | None = None
        with (
            torch.device("meta"),
            Unfilled(),
        ):  # on other devices torch's modules would initialise values that are never read
            self._build()
        if device != "meta":
            with Unfilled():
                self.to_empty(device=device)

    def _build(self) -> None:
        """Build the modules of this part, in the order in which the kind declares their parameters."""
        raise NotImplementedError

    def set_dropout_context(self, seed: int, step: int, sample_ids_B: Tensor) -> Tensor | None:
        """Set which samples the next forward pass reads, as indices in this step's global batch, on the model's device.

        Required before a forward pass in training with dropout > 0. `seed` is the run's seed. Returns the keys of
        dropout in adapters, which `give_adapters` needs before blocks are computed again; None: there is none.
        """
        if self.shape.dropout > 0.0:
            num_sites = 1 + self.block_sites * self.shape.num_layers
            self._dropout_keys_SB = site_keys(sample_keys(seed, step, sample_ids_B), num_sites)
        if self.drops_of_adapters:
            keys_B = mix(sample_keys(seed, step, sample_ids_B))  # others than at the sites of the model
            self.give_adapters(site_keys(keys_B, len(self.drops_of_adapters)))
        return self.adapter_keys_SB

    def give_adapters(self, keys_SB: Tensor) -> None:
        """Set the keys of dropout of all adapters, for the next forward pass or the next recomputation."""
        self.adapter_keys_SB = keys_SB
        for layer, keys_B in zip(self.drops_of_adapters, keys_SB.unbind(0), strict=True):
            if layer is not None:
                layer.adapter_keys_B = keys_B
                rows_T = self.rows_T if layer.reads_rows else self.tokens_T
                layer.adapter_rows_T = None if self.shape.streams else rows_T

    def dropout_keys(self, batch: int) -> Tensor | None:
        """The keys [S, B] of all dropout sites; None: this pass has no dropout."""
        if not (self.training and self.shape.dropout > 0.0):
            return None
        keys_SB = self._dropout_keys_SB
        if keys_SB is None or keys_SB.shape[1] != batch:
            raise RuntimeError("training with dropout: call set_dropout_context with this micro-batch's sample numbers")
        return keys_SB

    def each_block(self, keys_SB: Tensor | None) -> list[tuple[int, nn.Module, Tensor | None]]:
        """Number, module and dropout keys of each block of this part."""
        size = self.block_sites
        firsts = [1 + layer * size for layer in self.layers]
        keys = [None if keys_SB is None else keys_SB[first : first + size] for first in firsts]
        return list(zip(self.layers, self.blocks.values(), keys, strict=True))

    def select_rows(self, table_TD: Tensor, rows: int) -> Tensor:
        """Select from a per-position table the `rows` rows that this rank holds."""
        return table_TD[:rows] if self.rows_T is None else table_TD[self.rows_T.to(table_TD.device)]

    def select_tokens(self, tokens_BT: Tensor) -> Tensor:
        """Select the tokens at the positions that this rank reads."""
        return self.select_places(tokens_BT, self.tokens_T)

    def select_places(self, of_BT: Tensor, places_T: Tensor | None) -> Tensor:
        """Select what each sample has at some positions: `tokens_T` or `rows_T`; None: all."""
        return of_BT if places_T is None else of_BT[:, places_T.to(of_BT.device)]

    def embed(self, tokens_BT: Tensor, *, tied: bool, head_tokens: int | None = None) -> tuple[Tensor, Tensor | None]:
        """Embeddings [B, T, D] of the tokens that this rank reads; on a CPU also what receives a tied head's gradient.

        Args:
            tokens_BT: tokens of all positions.
            tied: whether the head computes a gradient of the same matrix in this pass (see `head.tied_embedding`).
            head_tokens: how many tokens the head reads; None: all tokens that the embedding reads.
        """
        tokens_BT, weight_VD, tied_dtype = self.select_tokens(tokens_BT), self.tok.weight, None
        if tied and self.ends and tokens_BT.device.type == "cpu" and not torch.compiler.is_compiling():
            # The head sums several chunks in fp32. The embedding's rows join this sum, which is rounded once.
            in_chunks = 0 < self.head_chunk_tokens < (tokens_BT.numel() if head_tokens is None else head_tokens)
            tied_dtype = torch.promote_types(weight_VD.dtype, torch.float32) if in_chunks else weight_VD.dtype
        x_BTD, tied_gradient_VD = self.vocabulary.embed(weight_VD, tokens_BT, tied_dtype)
        return with_gradient(x_BTD), tied_gradient_VD

    @property
    def current_objective(self) -> Objective:
        """The objective in training mode; in evaluation mode the one that is validated."""
        return self.objective if self.training else self.objective.validated

    def for_head(self, x: Tensor) -> Tensor:
        """The rows that the vocabulary matrix reads: with mu-P divided by the growth of the width (`models.mup`)."""
        return x if self.head_factor == 1.0 else x * self.head_factor

    def predict(
        self,
        x_BTD: Tensor,
        weight_VD: Tensor,
        targets_BT: Tensor | None,
        loss_scale: float,
        tied_gradient_VD: Tensor | None,
        *,
        skip_negative: bool,
    ) -> Tensor:
        """The summed loss (see `operators.head.head_loss`); without targets, the logits."""
        x_BTD = self.for_head(x_BTD)
        if targets_BT is None:
            return capped(self.vocabulary.logits(x_BTD, weight_VD), self.shape.logit_cap)
        return self.vocabulary.loss(
            x_BTD,
            weight_VD,
            targets_BT,
            self.head_chunk_tokens,
            loss_scale,
            tied_gradient_VD,
            skip_negative=skip_negative,
            objective=self.current_objective,
            cap=self.shape.logit_cap,
        )

    def compare(
        self,
        x_BTD: Tensor,
        weight_VD: Tensor,
        targets_BT: Tensor,
        answers: ComparedAnswers,
        loss_scale: float,
        tied_gradient_VD: Tensor | None,
    ) -> Tensor:
        """The summed loss of the preferences (see `operators.preferences`), divided by the ranks that share a sample.

        In evaluation mode, for samples without the sums of the reference that the loss needs: the sums, [B, K] in fp64.
        """
        preference = self.objective.preference
        assert preference is not None, "samples have answers to compare, and the objective is no preference"
        x_BTD, chunk = self.for_head(x_BTD), self.head_chunk_tokens
        cap, spans_BT = self.shape.logit_cap, self.select_tokens(answers.spans_BT)
        losses_BT = self.vocabulary.losses(x_BTD, weight_VD, targets_BT, chunk, tied_gradient_VD, cap=cap)
        if preference.referenced and answers.references_BK is None and not self.training:
            return self.sample_sums.total(sums_of(losses_BT, spans_BT, preference.sums))
        loss, self.objective_sums = compared(losses_BT, spans_BT, answers, preference, self.sample_sums, loss_scale)
        return loss

    def reinforce(
        self,
        x_BTD: Tensor,
        weight_VD: Tensor,
        targets_BT: Tensor,
        answers: WrittenAnswers,
        loss_scale: float,
        tied_gradient_VD: Tensor | None,
    ) -> Tensor:
        """The summed loss of answers that the model has written (see `operators.policy`).

        In evaluation mode: the negative sum of their rewards; without rewards, the log-probability of each token, [B,
        T].
        """
        policy = self.objective.policy
        assert policy is not None, "samples have answers with rewards, and the objective knows none"
        if not self.training and answers.rewards_BG is not None:
            return -answers.rewards_BG.sum()
        x_BTD, cap = self.for_head(x_BTD), self.shape.logit_cap
        if policy.temperature != 1.0:  # the model that writes has these probabilities
            x_BTD = x_BTD / policy.temperature
        losses_BT = self.vocabulary.losses(
            x_BTD, weight_VD, targets_BT, self.head_chunk_tokens, tied_gradient_VD, cap=cap
        )
        if answers.rewards_BG is None:
            return -losses_BT
        loss, self.objective_sums = policy_loss(losses_BT, answers, policy, loss_scale)
        return loss


def padding(lengths_B: Tensor | None, positions: int) -> Tensor | None:
    """bool [B, positions], True from each sample's length on; None: there is no padding."""
    return None if lengths_B is None else torch.arange(positions, device=lengths_B.device) >= lengths_B[:, None]


def with_gradient(x: Tensor) -> Tensor:
    """x, which requires a gradient even if the embedding is not trained.

    So the first block's hooks and collectives run in every backward pass. This costs one more matrix
    product; a model with L layers has about 6 L.
    """
    return x if x.requires_grad or not torch.is_grad_enabled() else x.requires_grad_()
