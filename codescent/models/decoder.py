"""In: sizes of a decoder, or of an encoder of one sequence; the part that is wanted. Out: what all have at both ends.
Does not have blocks and knows no kind of model: each is a class of its own on top of it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from codescent.models.shape import Shape
from codescent.operators.dropout import sample_keys, site_keys
from codescent.operators.head import Vocabulary
from codescent.operators.linear import Later

# Shapes: B samples, T positions, D hidden_dim, V vocab_size.


class Decoder(nn.Module):
    """A decoder (or an encoder of one sequence, which has the same ends), or a part of it.

    Args:
        shape: sizes of the whole.
        head_chunk_tokens: rows of logits that exist at a time while training; 0: all at once.
        depths: the part: 0 the embedding, 1 to num_layers the blocks, num_layers + 1 the head; None: all.
        block_sites: places of a block where something is dropped; before the first block there is one.

    Attributes:
        layers: numbers of the blocks of this part.
        blocks: the layers by their number in the whole, one nn.Module each, to compile or to shard one by one.
        tok: the vocabulary matrix that is read at the beginning; where the head is tied to it, at the end too.
        norm: before the head.
        vocabulary: what reads the vocabulary matrix, at either end.
        tokens_T: the positions of the tokens that this module reads of each sample, None: all, where the sequence is
            divided between ranks.
        rows_T: the positions whose rows are in its residual stream; None: all.
        later: what the backward passes of its linear layers have put off; None: nothing is.
    """

    blocks: nn.ModuleDict
    tok: nn.Embedding
    norm: nn.Module

    def __init__(self, shape: Shape, head_chunk_tokens: int, depths: range | None, block_sites: int = 0) -> None:
        super().__init__()
        depths = range(shape.num_layers + 2) if depths is None else depths
        self.shape, self.head_chunk_tokens = shape, head_chunk_tokens
        self.embeds, self.ends = 0 in depths, shape.num_layers + 1 in depths
        self.layers = [depth - 1 for depth in depths if 1 <= depth <= shape.num_layers]
        self.vocabulary = Vocabulary()
        self.tokens_T: Tensor | None = None
        self.rows_T: Tensor | None = None
        self.later: Later | None = None
        self._num_sites = 1 + block_sites * shape.num_layers
        self._dropout_keys_B: Tensor | None = None

    def set_dropout_context(self, seed: int, step: int, sample_ids_B: Tensor) -> None:
        """Says which samples the next forward pass reads; needed while training with dropout > 0.

        Args:
            seed: the run's seed.
            step: number of the step.
            sample_ids_B: number of each sample of the micro-batch in the global batch of this step, on its device.
        """
        if self.shape.dropout > 0.0:
            self._dropout_keys_B = sample_keys(seed, step, sample_ids_B)

    def site_keys(self, batch: int) -> Tensor | None:
        """The keys [S, B] of all places where this pass drops something; None: it drops nothing."""
        if not (self.training and self.shape.dropout > 0.0):
            return None
        keys_B = self._dropout_keys_B
        if keys_B is None or len(keys_B) != batch:
            raise RuntimeError("training with dropout: call set_dropout_context with this micro-batch's sample numbers")
        return site_keys(keys_B, self._num_sites)

    def here(self, weight_TD: Tensor, rows: int) -> Tensor:
        """Of something that every position has a row of, this module's rows, so many."""
        return weight_TD[:rows] if self.rows_T is None else weight_TD[self.rows_T.to(weight_TD.device)]

    def embed(self, tokens_BT: Tensor, *, tied: bool) -> tuple[Tensor, Tensor | None]:
        """Rows of the tokens at this module's positions.

        Args:
            tokens_BT: all of them.
            tied: whether the head will read the same matrix in this pass, and make a gradient of it.

        Returns:
            The rows [B, T, D]; on a CPU the port through which a tied head hands in its gradient of `tok.weight`.
        """
        tokens_BT, weight_VD, port_dtype = _some(tokens_BT, self.tokens_T), self.tok.weight, None
        if tied and self.ends and tokens_BT.device.type == "cpu" and not torch.compiler.is_compiling():
            # Several chunks of the head are added in fp32: the embedding's rows too then, and the sum is rounded once.
            in_chunks = 0 < self.head_chunk_tokens < tokens_BT.numel()
            port_dtype = torch.promote_types(weight_VD.dtype, torch.float32) if in_chunks else weight_VD.dtype
        x_BTD, port_VD = self.vocabulary.embed(weight_VD, tokens_BT, port_dtype)
        return wanting_gradient(x_BTD), port_VD

    def end(
        self,
        x_BTD: Tensor,
        weight_VD: Tensor,
        targets_BT: Tensor | None,
        loss_scale: float,
        port_VD: Tensor | None,
        last_B: Tensor | None,
        *,
        some: bool = False,
    ) -> Tensor:
        """The sum of the losses, or logits; with `last_B` of one token of each row. `weight_VD` is the head's; `some`:
        targets may be negative, where nothing is wanted."""
        x_BTD = self.norm(x_BTD)
        if targets_BT is not None:
            targets_BT = _some(targets_BT, self.tokens_T)
            chunk = self.head_chunk_tokens
            return self.vocabulary.loss(x_BTD, weight_VD, targets_BT, chunk, loss_scale, port_VD, some=some)
        if last_B is not None:
            x_BTD = x_BTD[torch.arange(len(x_BTD), device=x_BTD.device), last_B]
        return x_BTD @ weight_VD.t()


def wanting_gradient(x: Tensor) -> Tensor:
    """x, whose gradient is made also where the embedding it comes from is not trained: so a backward pass goes through
    the first block as through any other, whatever hooks and collectives wait for it there. Nobody reads it then: the
    price is one product of the first block, of about 6 L in all of a backward pass."""
    return x if x.requires_grad or not torch.is_grad_enabled() else x.requires_grad_()


def _some(tokens_BT: Tensor, positions_T: Tensor | None) -> Tensor:
    """The tokens at these positions."""
    return tokens_BT if positions_T is None else tokens_BT[:, positions_T.to(tokens_BT.device)]
