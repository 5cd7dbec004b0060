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
from codescent.models.head import head_loss, tied_embedding

# Shapes: B samples, T positions, D hidden_dim, V vocab_size, L layers.


class GPT2(nn.Module):
    """GPT-2 (Radford et al. 2019); the head is tied to `tok.weight`.

    Attributes:
        blocks: the layers, one nn.Module each, to compile or to shard one by one.
    """

    def __init__(self, shape: GPT2Shape, head_chunk_tokens: int = 1024, device: str = "meta") -> None:
        super().__init__()
        self.shape, self.head_chunk_tokens = shape, head_chunk_tokens
        # Built on meta and then moved: torch's modules would draw values here that are thrown away.
        self.tok = nn.Embedding(shape.vocab_size, shape.hidden_dim, device="meta")
        self.pos = nn.Embedding(shape.seq_len, shape.hidden_dim, device="meta")
        self.blocks = nn.ModuleList(Block(shape, "meta") for _ in range(shape.num_layers))
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
        tokens_BT: Tensor,
        targets_BT: Tensor | None = None,
        cache: KVCache | None = None,
        *,
        loss_scale: float = 1.0,
        counts: Sequence[int] | None = None,
    ) -> Tensor:
        """The sum of the token losses where targets are given, else logits.

        Args:
            tokens_BT: int64, T <= seq_len.
            targets_BT: int64: the token that follows each one.
            cache: keys and values of what was read before; then the logits are of each row's last token only.
            loss_scale: factor on the gradients (not on the value): 1 / (target tokens of the global batch).
            counts: with a cache, how many of the T tokens are real in each row (the rest is padding at the end).

        Returns:
            A scalar (fp32; fp64 in fp64), or logits [B, T, V], or [B, V] with a cache.
        """
        port_VD = None
        if cache is None:
            x_BTD, port_VD = self._embed(tokens_BT, tied=targets_BT is not None)
        else:
            positions_BT, last_B = cache.begin(tokens_BT.shape[1], counts)
            x_BTD = self.tok(tokens_BT) + self.pos(positions_BT)
        keys_SB = self._site_keys(len(tokens_BT))
        if keys_SB is not None:
            x_BTD = drop(x_BTD, keys_SB[0], self.shape.dropout)
        for layer, block in enumerate(self.blocks):
            first = 1 + layer * DROPOUT_SITES
            keys_3B = None if keys_SB is None else keys_SB[first : first + DROPOUT_SITES]
            x_BTD = block(x_BTD, keys_3B, None if cache is None else cache.layers[layer])
        x_BTD = self.norm(x_BTD)
        if targets_BT is not None:
            return head_loss(
                x_BTD.flatten(0, 1), self.tok.weight, targets_BT.flatten(), self.head_chunk_tokens, loss_scale, port_VD
            )
        if cache is not None:
            x_BTD = x_BTD[torch.arange(len(x_BTD), device=x_BTD.device), last_B]
        logits: Tensor = x_BTD @ self.tok.weight.t()
        return logits

    def _embed(self, tokens_BT: Tensor, *, tied: bool) -> tuple[Tensor, Tensor | None]:
        """Embedded tokens, and on a CPU the port through which the head hands in its gradient of `tok.weight`."""
        positions_TD = self.pos.weight[: tokens_BT.shape[1]]
        weight_VD = self.tok.weight
        if not tied or tokens_BT.device.type != "cpu" or torch.compiler.is_compiling():
            return self.tok(tokens_BT) + positions_TD, None
        # Several chunks of the head are added in fp32: the embedding's rows too then, and the sum is rounded once.
        in_chunks = 0 < self.head_chunk_tokens < tokens_BT.numel()
        port_dtype = torch.promote_types(weight_VD.dtype, torch.float32) if in_chunks else weight_VD.dtype
        x_BTD, port_VD = tied_embedding(weight_VD, tokens_BT, port_dtype)
        return x_BTD + positions_TD, port_VD

    def _site_keys(self, batch: int) -> Tensor | None:
        if not (self.training and self.shape.dropout > 0.0):
            return None
        keys_B = self._dropout_keys_B
        if keys_B is None or len(keys_B) != batch:
            raise RuntimeError("training with dropout: call set_dropout_context with this micro-batch's sample numbers")
        return site_keys(keys_B, 1 + DROPOUT_SITES * self.shape.num_layers)
