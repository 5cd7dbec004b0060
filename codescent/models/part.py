"""In: the sizes of a model, and which depths of it. Out: the base of every kind's module: the whole model or a part.
Does not run blocks and knows no kind of model: each kind's `forward` does."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from codescent.models.shape import Shape
from codescent.operators.dropout import sample_keys, site_keys
from codescent.operators.head import Vocabulary
from codescent.operators.linear import Deferred

# Shapes: B samples, T positions, D hidden_dim, V vocab_size; S dropout sites, places of a model that drop activations:
# one before the first block, then those of each block.


class Part(nn.Module):
    """A model, or the part of it on one virtual pipeline stage.

    forward takes tokens int64 [B, T], T <= seq_len, or without the embedding activations [B, T, D]. It returns with
    targets the sum of the losses, a scalar in fp32 (fp64 in fp64); without targets logits [B, T, V]; without the head
    activations [B, T, D]. `loss_scale` is a factor on the gradients, not on the value.

    Args:
        shape: sizes of the whole.
        head_chunk_tokens: rows of logits that exist at a time while training; 0: all.
        device: of the parameters, which have no values yet.
        depths: the part: 0 the embedding, 1 to num_layers the blocks, num_layers + 1 the head; None: all.

    Attributes:
        block_sites: dropout sites of a block.
        embeds, ends: whether the part has the embedding, and the head.
        layers: numbers of its blocks.
        blocks: its blocks by their number in the whole, one nn.Module each, to compile or to shard one by one.
        tok: the vocabulary matrix of the embedding; where the head is tied to it, also of the head.
        norm: before the head.
        vocabulary: what reads the vocabulary matrix, in embedding and head.
        tokens_T: the positions of each sample whose tokens this rank reads; None: all.
        rows_T: the positions of each sample whose rows are in the residual stream of this rank; None: all.
        deferred: gradients of weights that backward passes have deferred; None: they defer none.
    """

    block_sites = 0
    shape: Shape
    blocks: nn.ModuleDict
    tok: nn.Embedding
    norm: nn.Module

    def __init__(
        self, shape: Shape, head_chunk_tokens: int = 1024, device: str = "meta", depths: range | None = None
    ) -> None:
        super().__init__()
        depths = range(shape.num_layers + 2) if depths is None else depths
        self.shape, self.head_chunk_tokens = shape, head_chunk_tokens
        self.embeds, self.ends = 0 in depths, shape.num_layers + 1 in depths
        self.layers = [depth - 1 for depth in depths if 1 <= depth <= shape.num_layers]
        self.vocabulary = Vocabulary()
        self.tokens_T: Tensor | None = None
        self.rows_T: Tensor | None = None
        self.deferred: Deferred | None = None
        self._dropout_keys_SB: Tensor | None = None
        with torch.device("meta"):  # torch's modules would draw values elsewhere, which nobody reads
            self._build()
        if device != "meta":
            self.to_empty(device=device)

    def _build(self) -> None:
        """Make the modules of this part, in the order in which the kind declares their parameters."""
        raise NotImplementedError

    def set_dropout_context(self, seed: int, step: int, sample_ids_B: Tensor) -> None:
        """Set the samples of the next forward pass, as numbers in this step's global batch, on its device.

        Needed while training with dropout > 0. `seed` is that of the run.
        """
        if self.shape.dropout > 0.0:
            num_sites = 1 + self.block_sites * self.shape.num_layers
            self._dropout_keys_SB = site_keys(sample_keys(seed, step, sample_ids_B), num_sites)

    def dropout_keys(self, batch: int) -> Tensor | None:
        """The keys [S, B] of all sites; None: this pass drops nothing."""
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
        return tokens_BT if self.tokens_T is None else tokens_BT[:, self.tokens_T.to(tokens_BT.device)]

    def embed(self, tokens_BT: Tensor, *, tied: bool, head_tokens: int | None = None) -> tuple[Tensor, Tensor | None]:
        """Rows [B, T, D] of the tokens that this rank reads; on a CPU also what receives a tied head's gradient.

        Args:
            tokens_BT: of all positions.
            tied: whether the head makes a gradient of the same matrix in this pass (see `head.tied_embedding`).
            head_tokens: how many tokens the head reads; None: all that the embedding reads.
        """
        tokens_BT, weight_VD, tied_dtype = self.select_tokens(tokens_BT), self.tok.weight, None
        if tied and self.ends and tokens_BT.device.type == "cpu" and not torch.compiler.is_compiling():
            # Several chunks of the head are summed in fp32: so are the rows of the embedding, and rounded once.
            in_chunks = 0 < self.head_chunk_tokens < (tokens_BT.numel() if head_tokens is None else head_tokens)
            tied_dtype = torch.promote_types(weight_VD.dtype, torch.float32) if in_chunks else weight_VD.dtype
        x_BTD, tied_gradient_VD = self.vocabulary.embed(weight_VD, tokens_BT, tied_dtype)
        return with_gradient(x_BTD), tied_gradient_VD

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
        """The sum of the losses (see `operators.head.head_loss`); without targets, the logits."""
        if targets_BT is None:
            logits: Tensor = x_BTD @ weight_VD.t()
            return logits
        chunk = self.head_chunk_tokens
        return self.vocabulary.loss(
            x_BTD, weight_VD, targets_BT, chunk, loss_scale, tied_gradient_VD, skip_negative=skip_negative
        )


def padding(lengths_B: Tensor | None, positions: int) -> Tensor | None:
    """bool [B, positions], True from each sample's length on; None: there is no padding."""
    return None if lengths_B is None else torch.arange(positions, device=lengths_B.device) >= lengths_B[:, None]


def with_gradient(x: Tensor) -> Tensor:
    """x, requiring a gradient also where the embedding is not trained.

    So hooks and collectives of the first block run in every backward pass. The price is one product, of about 6 L.
    """
    return x if x.requires_grad or not torch.is_grad_enabled() else x.requires_grad_()
