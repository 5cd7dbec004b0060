"""In: tokens [B, T], and targets while training. Out: the sum of the token losses, or logits.
Does not hold optimizer, device placement or parallelism: strategies wrap it from outside."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from codescent.models.decoder import Decoder
from codescent.models.gpt2.blocks import DROPOUT_SITES, Block
from codescent.models.gpt2.declare import GPT2Shape
from codescent.operators.cache import KVCache
from codescent.operators.dropout import drop

# Shapes: B samples, T positions, D hidden_dim, V vocab_size, L layers.


class GPT2(Decoder):
    """GPT-2 (Radford et al. 2019), or a part of it (see Decoder); the head is tied to `tok.weight`."""

    shape: GPT2Shape

    def __init__(
        self, shape: GPT2Shape, head_chunk_tokens: int = 1024, device: str = "meta", depths: range | None = None
    ) -> None:
        super().__init__(shape, head_chunk_tokens, depths, DROPOUT_SITES)
        # Built on meta and then moved: torch's modules would draw values here that are thrown away.
        if self.embeds or self.ends:
            self.tok = nn.Embedding(shape.vocab_size, shape.hidden_dim, device="meta")
        if self.embeds:
            self.pos = nn.Embedding(shape.seq_len, shape.hidden_dim, device="meta")
        self.blocks = nn.ModuleDict({str(layer): Block(shape, "meta") for layer in self.layers})
        if self.ends:
            self.norm = nn.LayerNorm(shape.hidden_dim, bias=shape.bias, device="meta")
        if device != "meta":
            self.to_empty(device=device)

    def forward(
        self,
        inputs: Tensor,
        targets_BT: Tensor | None = None,
        cache: KVCache | None = None,
        *,
        loss_scale: float = 1.0,
        counts: Sequence[int] | None = None,
        lengths_B: Tensor | None = None,
    ) -> Tensor:
        """The sum of the token losses where targets are given, else logits; of a part without the head, activations.

        Args:
            inputs: tokens int64 [B, T], T <= seq_len; of a part without the embedding, activations [B, T, D].
            targets_BT: int64: the token that follows each one; with `lengths_B` negative where nothing is wanted.
            cache: keys and values of what was read before; then the logits are of each row's last token only.
            loss_scale: factor on the gradients (not on the value): 1 / (target tokens of the global batch).
            counts: with a cache, how many of the T tokens are real in each row (the rest is padding at the end).
            lengths_B: tokens of each sample that are not padding; None: all. Of padding, which is behind them, no
                position sees anything: it is given to say that something is not wanted.

        Returns:
            A scalar (fp32; fp64 in fp64), or logits [B, T, V], or [B, V] with a cache; activations [B, T, D].
        """
        x_BTD, port_VD, last_B = inputs, None, None
        keys_SB = self.site_keys(len(inputs))
        if cache is not None:
            positions_BT, last_B = cache.begin(inputs.shape[1], counts)
            x_BTD = self.tok(inputs) + self.pos(positions_BT)
        elif self.embeds:
            x_BTD, port_VD = self.embed(inputs, tied=targets_BT is not None)
            x_BTD = x_BTD + self.here(self.pos.weight, x_BTD.shape[1])
        if self.embeds and keys_SB is not None:
            x_BTD = drop(x_BTD, keys_SB[0], self.shape.dropout, self.rows_T)
        for name, block in self.blocks.items():
            layer = int(name)
            first = 1 + layer * DROPOUT_SITES
            keys_3B = None if keys_SB is None else keys_SB[first : first + DROPOUT_SITES]
            x_BTD = block(x_BTD, keys_3B, None if cache is None else cache.layers[layer], self.rows_T)
        if not self.ends:
            return x_BTD
        some = lengths_B is not None
        return self.end(x_BTD, self.tok.weight, targets_BT, loss_scale, port_VD, last_B, some=some)
