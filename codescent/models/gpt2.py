"""In: tokens [B, T], and targets while training. Out: the sum of the token losses, or logits.
Does not hold optimizer, device placement or parallelism: strategies wrap it from outside."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from codescent.models.blocks import DROPOUT_SITES, Block
from codescent.models.cache import KVCache
from codescent.models.dropout import drop, sample_keys, site_keys
from codescent.models.gpt2_shape import GPT2Shape
from codescent.models.head import Vocabulary
from codescent.models.linear import Later

# Shapes: B samples, T positions, D hidden_dim, V vocab_size, L layers.


class GPT2(nn.Module):
    """GPT-2 (Radford et al. 2019), or a part of it; the head is tied to `tok.weight`.

    Args:
        shape: sizes of the whole.
        head_chunk_tokens: rows of logits that exist at a time while training; 0: all at once.
        device: where the parameters lie.
        depths: the part: 0 the embedding, 1 to num_layers the blocks, num_layers + 1 the head; None: all.

    Attributes:
        blocks: the layers by their number in the whole, one nn.Module each, to compile or to shard one by one.
        vocabulary: what reads `tok.weight`, at either end.
        tokens_T: the positions of the tokens that this module reads of each sample, None: all, where the sequence is
            divided between ranks.
        rows_T: the positions whose rows are in its residual stream; None: all.
        later: what the backward passes of its linear layers have put off; None: nothing is.
    """

    def __init__(
        self, shape: GPT2Shape, head_chunk_tokens: int = 1024, device: str = "meta", depths: range | None = None
    ) -> None:
        super().__init__()
        depths = range(shape.num_layers + 2) if depths is None else depths
        self.shape, self.head_chunk_tokens = shape, head_chunk_tokens
        self.embeds, self.ends = 0 in depths, shape.num_layers + 1 in depths
        self.vocabulary = Vocabulary()
        self.tokens_T: Tensor | None = None
        self.rows_T: Tensor | None = None
        self.later: Later | None = None
        # Built on meta and then moved: torch's modules would draw values here that are thrown away.
        if self.embeds or self.ends:
            self.tok = nn.Embedding(shape.vocab_size, shape.hidden_dim, device="meta")
        if self.embeds:
            self.pos = nn.Embedding(shape.seq_len, shape.hidden_dim, device="meta")
        layers = [depth - 1 for depth in depths if 1 <= depth <= shape.num_layers]
        self.blocks = nn.ModuleDict({str(layer): Block(shape, "meta") for layer in layers})
        if self.ends:
            self.norm = nn.LayerNorm(shape.hidden_dim, bias=shape.bias, device="meta")
        self._dropout_keys_B: Tensor | None = None
        if device != "meta":
            self.to_empty(device=device)

    def set_dropout_context(self, seed: int, step: int, sample_ids_B: Tensor) -> None:
        """Says which samples the next forward pass reads; needed while training with dropout > 0.

        Args:
            seed: the run's seed.
            step: number of the step.
            sample_ids_B: number of each sample of the micro-batch in the global batch of this step, on its device.
        """
        if self.shape.dropout > 0.0:
            self._dropout_keys_B = sample_keys(seed, step, sample_ids_B)

    def forward(
        self,
        inputs: Tensor,
        targets_BT: Tensor | None = None,
        cache: KVCache | None = None,
        *,
        loss_scale: float = 1.0,
        counts: Sequence[int] | None = None,
    ) -> Tensor:
        """The sum of the token losses where targets are given, else logits; of a part without the head, activations.

        Args:
            inputs: tokens int64 [B, T], T <= seq_len; of a part without the embedding, activations [B, T, D].
            targets_BT: int64: the token that follows each one.
            cache: keys and values of what was read before; then the logits are of each row's last token only.
            loss_scale: factor on the gradients (not on the value): 1 / (target tokens of the global batch).
            counts: with a cache, how many of the T tokens are real in each row (the rest is padding at the end).

        Returns:
            A scalar (fp32; fp64 in fp64), or logits [B, T, V], or [B, V] with a cache; activations [B, T, D].
        """
        x_BTD, port_VD, last_B = inputs, None, None
        keys_SB = self._site_keys(len(inputs))
        if cache is not None:
            positions_BT, last_B = cache.begin(inputs.shape[1], counts)
            x_BTD = self.tok(inputs) + self.pos(positions_BT)
        elif self.embeds:
            x_BTD, port_VD = self._embed(_some(inputs, self.tokens_T), tied=targets_BT is not None)
        if self.embeds and keys_SB is not None:
            x_BTD = drop(x_BTD, keys_SB[0], self.shape.dropout, self.rows_T)
        for name, block in self.blocks.items():
            layer = int(name)
            first = 1 + layer * DROPOUT_SITES
            keys_3B = None if keys_SB is None else keys_SB[first : first + DROPOUT_SITES]
            x_BTD = block(x_BTD, keys_3B, None if cache is None else cache.layers[layer], self.rows_T)
        return self._end(x_BTD, targets_BT, loss_scale, port_VD, last_B) if self.ends else x_BTD

    def _embed(self, tokens_BT: Tensor, *, tied: bool) -> tuple[Tensor, Tensor | None]:
        """Embedded tokens, and on a CPU the port through which the head hands in its gradient of `tok.weight`."""
        port_dtype, weight_VD = None, self.tok.weight
        if tied and self.ends and tokens_BT.device.type == "cpu" and not torch.compiler.is_compiling():
            # Several chunks of the head are added in fp32: the embedding's rows too then, and the sum is rounded once.
            in_chunks = 0 < self.head_chunk_tokens < tokens_BT.numel()
            port_dtype = torch.promote_types(weight_VD.dtype, torch.float32) if in_chunks else weight_VD.dtype
        x_BTD, port_VD = self.vocabulary.embed(weight_VD, tokens_BT, port_dtype)
        weight_TD = self.pos.weight
        positions_TD = weight_TD[: x_BTD.shape[1]] if self.rows_T is None else weight_TD[self.rows_T.to(x_BTD.device)]
        return x_BTD + positions_TD, port_VD

    def _end(
        self, x_BTD: Tensor, targets_BT: Tensor | None, loss_scale: float, port_VD: Tensor | None, last_B: Tensor | None
    ) -> Tensor:
        """The sum of the losses, or logits; with `last_B` of one token of each row."""
        x_BTD = self.norm(x_BTD)
        if targets_BT is not None:
            targets_BT = _some(targets_BT, self.tokens_T)
            return self.vocabulary.loss(x_BTD, self.tok.weight, targets_BT, self.head_chunk_tokens, loss_scale, port_VD)
        if last_B is not None:
            x_BTD = x_BTD[torch.arange(len(x_BTD), device=x_BTD.device), last_B]
        logits: Tensor = x_BTD @ self.tok.weight.t()
        return logits

    def _site_keys(self, batch: int) -> Tensor | None:
        if not (self.training and self.shape.dropout > 0.0):
            return None
        keys_B = self._dropout_keys_B
        if keys_B is None or len(keys_B) != batch:
            raise RuntimeError("training with dropout: call set_dropout_context with this micro-batch's sample numbers")
        return site_keys(keys_B, 1 + DROPOUT_SITES * self.shape.num_layers)


def _some(tokens_BT: Tensor, positions_T: Tensor | None) -> Tensor:
    """The tokens at these positions."""
    return tokens_BT if positions_T is None else tokens_BT[:, positions_T.to(tokens_BT.device)]
