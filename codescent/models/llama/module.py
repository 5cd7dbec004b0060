"""In: the sizes of a Llama, and which layers to build (embedding, blocks, head). Out: the torch module of these layers.
Does not run the blocks (decoder.py does). Does not contain the optimizer, device placement or parallelism."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial

import torch
from torch import Tensor, nn

from codescent.base.device import wide_dtype
from codescent.models.decoder import Block, Decoder
from codescent.models.llama.declare import LlamaShape
from codescent.operators.activations import SWIGLU, ActivatedThenLinear, GateUp
from codescent.operators.attention import Attention
from codescent.operators.documents import DocumentBounds
from codescent.operators.frequencies import frequencies, gain_of
from codescent.operators.head_norm import HeadNorm
from codescent.operators.rotary import every_turn, turns
from codescent.operators.tables import Table

# Shapes: B samples, T positions, D hidden_dim, C = head_dim / 2.


class Llama(Decoder):
    """Llama (Touvron et al. 2023; Llama Team 2024), or a part of it.

    A block is x + attn(norm_1(x)), then x + mlp(norm_2(x)); with `shape.norm` "output" x + norm_1(attn(x)), then x +
    norm_2(mlp(x)). The norms are RMSNorm (Zhang and Sennrich 2019, "Root Mean
    Square Layer Normalization").
    """

    shape: LlamaShape

    def _build(self) -> None:
        shape, width = self.shape, self.shape.hidden_dim
        self.ties_head, self.pos = shape.tie_head, None
        rope = shape.head_dim, shape.rope_theta, shape.rope_scaling
        self.frequencies, self.turns = (
            Table(partial(frequencies, *rope, shape.seq_len)),
            Table(partial(every_turn, shape.seq_len, *rope)),
        )
        self.gain = gain_of(shape.rope_scaling)
        self.tables = (self.frequencies, self.turns)
        if self.embeds or (self.ends and shape.tie_head):
            self.tok = nn.Embedding(shape.vocab_size, width)
        self.blocks = nn.ModuleDict({str(layer): self._block() for layer in self.layers})
        if self.ends:
            self.norm = nn.RMSNorm(width, shape.norm_eps)
            if not shape.tie_head:
                self.head = nn.Linear(width, shape.vocab_size, bias=False)

    def _block(self) -> Block:
        shape, width = self.shape, self.shape.hidden_dim
        over_all = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        norm = HeadNorm(shape.norm_eps, over_all if shape.qk_norm == "all" else None)
        attn = Attention(
            width,
            (shape.num_heads, shape.num_kv_heads),
            shape.bias,
            head_dim=shape.head_dim,
            qkv_bias=shape.qkv_bias,
            norm=None if shape.qk_norm == "none" else norm,
            window=shape.window,
        )
        # SwiGLU (Shazeer 2020, "GLU Variants Improve Transformer")
        gate_up, down = GateUp(width, shape.ffn_dim), ActivatedThenLinear(shape.ffn_dim, width, False, SWIGLU)
        mlp = nn.Sequential(OrderedDict(gate_up=gate_up, down=down))
        first = shape.norm == "first"
        rms_norm = partial(nn.RMSNorm, width, shape.norm_eps)
        return Block(rms_norm, 0.0, norm_first=first, norm_output=not first, attn=attn, mlp=mlp)

    def angles(
        self, inputs: Tensor, positions_BT: Tensor | None, dtype: torch.dtype, documents: DocumentBounds | None = None
    ) -> Tensor:
        """See `Decoder`."""
        if positions_BT is not None:
            return turns(self.frequencies.on(inputs.device, wide_dtype(inputs.device)), positions_BT, dtype, self.gain)
        turns_TC2: Tensor = self.turns.on(inputs.device, torch.promote_types(dtype, torch.float32))
        if documents is not None:
            return turns_TC2[self.select_places(documents.positions_BT, self.tokens_T)]
        if self.tokens_T is not None:
            return turns_TC2[self.tokens_T.to(inputs.device)]
        # With sequence parallelism a later stage receives only some of the rows, but attention reads all rows.
        known = self.embeds or self.rows_T is None
        return turns_TC2[: inputs.shape[1]] if known else turns_TC2
