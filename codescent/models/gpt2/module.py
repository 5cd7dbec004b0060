"""In: the sizes of a GPT-2, and which layers to build (embedding, blocks, head). Out: the torch module of these layers.
Does not run the blocks (decoder.py does). Does not contain the optimizer, device placement or parallelism."""

from __future__ import annotations

from functools import partial

from torch import nn

from codescent.models.decoder import Block, Decoder
from codescent.operators.activations import GELU, feed_forward
from codescent.operators.attention import Attention
from codescent.operators.block_attention import ScoreTraits


class GPT2(Decoder):
    """GPT-2 (Radford et al. 2019), or a part of it; the head is tied to `tok.weight`.

    A block is x + attn(norm_1(x)), then x + mlp(norm_2(x)).
    """

    block_sites = Block.SITES

    def _build(self) -> None:
        shape, width = self.shape, self.shape.hidden_dim
        if self.embeds or self.ends:
            self.tok = nn.Embedding(shape.vocab_size, width)
        self.pos = nn.Embedding(shape.seq_len, width) if self.embeds else None
        self.blocks = nn.ModuleDict({str(layer): self._block() for layer in self.layers})
        if self.ends:
            self.norm = nn.LayerNorm(width, bias=shape.bias)

    def _block(self) -> Block:
        shape, width = self.shape, self.shape.hidden_dim
        heads, scores = (shape.num_heads, shape.num_kv_heads), ScoreTraits(width=shape.score_width)
        attn = Attention(width, heads, shape.bias, shape.dropout, scores=scores)
        mlp = feed_forward(width, shape.ffn_dim, shape.bias, GELU)
        norm = partial(nn.LayerNorm, width, bias=shape.bias)
        return Block(norm, shape.dropout, norm_first=True, attn=attn, mlp=mlp)
