"""In: tokens [B, T], and targets while training. Out: the sum of the token losses, or logits.
Does not hold optimizer, device placement or parallelism: strategies wrap it from outside."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from codescent.models.decoder import Decoder
from codescent.models.llama.declare import LlamaShape
from codescent.operators.activations import GateUp, SwiGLUThenLinear
from codescent.operators.attention import Attention
from codescent.operators.cache import KVCache, LayerCache
from codescent.operators.rotary import turns

# Shapes: B samples, T positions, D hidden_dim, V vocab_size, C = head_dim / 2.


class GatedFeedForward(nn.Module):
    """SwiGLU (Shazeer 2020, "GLU Variants Improve Transformer")."""

    def __init__(self, shape: LlamaShape, device: str) -> None:
        super().__init__()
        self.gate_up = GateUp(shape.hidden_dim, shape.ffn_dim, device)
        self.down = SwiGLUThenLinear(shape.ffn_dim, shape.hidden_dim, device)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """What the feed-forward adds to the residual stream."""
        y_BTD: Tensor = self.down(self.gate_up(x_BTD))
        return y_BTD


class LlamaBlock(nn.Module):
    """One layer: x + attn(norm_1(x)), then x + mlp(norm_2(x)), with norms by the root of the mean square (Zhang and
    Sennrich 2019, "Root Mean Square Layer Normalization")."""

    def __init__(self, shape: LlamaShape, device: str) -> None:
        super().__init__()
        self.norm_1 = nn.RMSNorm(shape.hidden_dim, shape.norm_eps, device=device)
        self.attn = Attention(shape, device)
        self.norm_2 = nn.RMSNorm(shape.hidden_dim, shape.norm_eps, device=device)
        self.mlp = GatedFeedForward(shape, device)

    def forward(self, x_BTD: Tensor, turns_TC2: Tensor, cache: LayerCache | None = None) -> Tensor:
        """The residual stream after this layer.

        Args:
            x_BTD: the residual stream.
            turns_TC2: of the positions that attention reads; there may be more of them, at the end.
            cache: this layer's keys and values of earlier positions, when generating.
        """
        x_BTD = x_BTD + self.attn(self.norm_1(x_BTD), None, cache, turns_TC2)
        x_BTD = x_BTD + self.mlp(self.norm_2(x_BTD))
        return x_BTD


class Llama(Decoder):
    """Llama (Touvron et al. 2023; Llama Team 2024), or a part of it (see Decoder)."""

    shape: LlamaShape

    def __init__(
        self, shape: LlamaShape, head_chunk_tokens: int = 1024, device: str = "meta", depths: range | None = None
    ) -> None:
        super().__init__(shape, head_chunk_tokens, depths)
        # Built on meta and then moved: torch's modules would draw values here that are thrown away.
        if self.embeds or (self.ends and shape.tie_head):
            self.tok = nn.Embedding(shape.vocab_size, shape.hidden_dim, device="meta")
        self.blocks = nn.ModuleDict({str(layer): LlamaBlock(shape, "meta") for layer in self.layers})
        if self.ends:
            self.norm = nn.RMSNorm(shape.hidden_dim, shape.norm_eps, device="meta")
            if not shape.tie_head:
                self.head = nn.Linear(shape.hidden_dim, shape.vocab_size, bias=False, device="meta")
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
        if cache is not None:
            positions, last_B = cache.begin(inputs.shape[1], counts)
            x_BTD = self.tok(inputs)
        else:
            positions = self._positions(inputs)
            if self.embeds:
                x_BTD, port_VD = self.embed(inputs, tied=self.shape.tie_head and targets_BT is not None)
        turns_TC2 = turns(self.shape, positions, x_BTD.dtype)
        for name, block in self.blocks.items():
            x_BTD = block(x_BTD, turns_TC2, None if cache is None else cache.layers[int(name)])
        if not self.ends:
            return x_BTD
        head = self.tok if self.shape.tie_head else self.head
        some = lengths_B is not None
        return self.end(x_BTD, head.weight, targets_BT, loss_scale, port_VD, last_B, some=some)

    def _positions(self, inputs: Tensor) -> Tensor:
        """Those that attention reads, on the device of the inputs; more of them at the end where it is not known how
        many these are."""
        if self.tokens_T is not None:
            return self.tokens_T.to(inputs.device)
        # Between tensor-parallel layers a later part of a pipeline has some of the rows; inside, attention sees all.
        all_here = self.embeds or self.rows_T is None
        return torch.arange(inputs.shape[1] if all_here else self.shape.seq_len, device=inputs.device)
