"""In: the sizes of a Llama, and which layers to build (embedding, blocks, head). Out: the torch module of these layers.
Does not run the blocks (decoder.py does). Does not contain the optimizer, device placement or parallelism."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from codescent.base.device import wide_dtype
from codescent.models.decoder import Block, Decoder
from codescent.models.llama.declare import LlamaShape
from codescent.models.multi_token import TokenPredictor, tokens_ahead
from codescent.operators.activations import ActivatedThenLinear
from codescent.operators.attention import Attention
from codescent.operators.block_attention import ScoreTraits
from codescent.operators.documents import DocumentBounds
from codescent.operators.experts import Experts
from codescent.operators.gate_up import GateUp
from codescent.operators.gated import GATED
from codescent.operators.head_norm import HeadNorm
from codescent.operators.latent_attention import LatentAttention
from codescent.operators.latents import LatentSizes
from codescent.operators.plus_one_norm import PlusOneNorm
from codescent.operators.root_mean_square_norm import RootMeanSquareNorm
from codescent.operators.rotary import every_turn
from codescent.operators.routing import RouterTraits
from codescent.operators.tables import Table
from codescent.plan.model import RopeScaling

# Shapes: B samples, T positions, D hidden_dim, C = head_dim / 2.


class RotaryTables:
    """Rotary positions of some layers: the tables of one base.

    Args:
        shape: of the model.
        theta, scaling: base of the frequencies, and how they are scaled.
    """

    def __init__(self, shape: LlamaShape, theta: float, scaling: RopeScaling | None) -> None:
        channels, turning = (shape.head_dim, shape.rotary_dim) if not shape.kv_latent_dim else (shape.rotary_dim, 0)
        self.turns = Table(partial(every_turn, shape.seq_len, channels, theta, scaling, rotary_dim=turning))


class Llama(Decoder):
    """Llama (Touvron et al. 2023; Llama Team 2024), or a part of it.

    A block is x + attn(norm_1(x)), then x + mlp(norm_2(x)); with `shape.norm` "output" x + norm_1(attn(x)), then x +
    norm_2(mlp(x)); with "both" x + norm_1_out(attn(norm_1(x))), and so on. The norms are RMSNorm (Zhang and Sennrich
    2019, "Root Mean Square Layer Normalization").
    """

    shape: LlamaShape

    def _build(self) -> None:
        shape, width = self.shape, self.shape.hidden_dim
        self.ties_head, self.pos = shape.tie_head, None
        bases = [shape.bases[layer] for layer in self.layers]
        found = {
            local: RotaryTables(shape, shape.rope_local_theta, None)
            if local
            else RotaryTables(shape, shape.rope_theta, shape.rope_scaling)
            for local in dict.fromkeys(bases)
        }
        self.positions, self.position_of = list(found.values()), [list(found).index(local) for local in bases]
        self.tables = tuple(one.turns for one in self.positions)
        if shape.scale_embedding:
            self.embedding_scale = Table(lambda: torch.tensor(math.sqrt(shape.base_dim), dtype=torch.float64))
            self.tables += (self.embedding_scale,)
        if self.embeds or (self.ends and shape.tie_head):
            self.tok = nn.Embedding(shape.vocab_size, width)
        blocks = {layer: self._block(layer, routed=shape.routed[layer]) for layer in self.layers}
        self.blocks = nn.ModuleDict({str(layer): block for layer, block in blocks.items()})
        if self.ends:
            self.norm = self._norm()
        if self.ends and shape.mtp_layers:
            more = range(shape.num_layers, shape.num_layers + shape.mtp_layers)
            blocks |= {layer: self._block(layer, routed=shape.num_experts > 0) for layer in more}
            modules = {str(layer): TokenPredictor(self._norm, width, blocks[layer]) for layer in more}
            self.mtp = nn.ModuleDict(modules)
        routed = {layer: block.mlp for layer, block in blocks.items() if isinstance(block.mlp, Experts)}
        self.routers = {layer: experts.router for layer, experts in routed.items()}
        if self.ends and not shape.tie_head:
            self.head = nn.Linear(width, shape.vocab_size, bias=False)

    def _norm(self) -> nn.Module:
        kind = PlusOneNorm if self.shape.norm_plus_one else RootMeanSquareNorm
        return kind(self.shape.hidden_dim, self.shape.norm_eps)

    def _block(self, layer: int, *, routed: bool) -> Block:
        shape = self.shape
        layer = min(layer, shape.num_layers - 1)  # behind the blocks as the last one
        attn = self._latent_attention(layer) if shape.kv_latent_dim else self._attention(layer)
        first, output = shape.norm != "output", shape.norm != "first"
        mlp = self._experts() if routed else self._feed_forward(shape.ffn_dim)
        return Block(self._norm, 0.0, norm_first=first, norm_output=output, attn=attn, mlp=mlp)

    def _latent_attention(self, layer: int) -> nn.Module:
        shape = self.shape
        heads = shape.num_heads, shape.head_dim, shape.rotary_dim, shape.value_dim
        sizes = LatentSizes(*heads, shape.kv_latent_dim, shape.q_latent_dim)
        values = shape.value_dim if shape.value_dim < shape.head_dim else 0
        scores = ScoreTraits(shape.windows[layer], shape.score_cap, shape.score_width, values)
        return LatentAttention(shape.hidden_dim, sizes, scores)

    def _attention(self, layer: int) -> nn.Module:
        shape, width = self.shape, self.shape.hidden_dim
        over_all = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        norm = HeadNorm(shape.norm_eps, over_all if shape.qk_norm == "all" else None, shape.norm_offset)
        return Attention(
            width,
            (shape.num_heads, shape.num_kv_heads),
            shape.bias,
            head_dim=shape.head_dim,
            qkv_bias=shape.qkv_bias,
            norm=None if shape.qk_norm == "none" else norm,
            scores=ScoreTraits(shape.windows[layer], shape.score_cap, shape.score_width),
        )

    def _feed_forward(self, ffn: int) -> nn.Module:
        width = self.shape.hidden_dim
        down = ActivatedThenLinear(ffn, width, False, GATED[self.shape.activation])
        return nn.Sequential(OrderedDict(gate_up=GateUp(width, ffn), down=down))

    def _experts(self) -> nn.Module:
        shape = self.shape
        traits = RouterTraits(
            shape.num_experts,
            shape.experts_per_token,
            shape.route_norm,
            shape.route_scores,
            shape.route_groups or 1,
            shape.groups_per_token or 1,
            shape.route_scale,
            shape.capacity_factor,
        )
        shared = self._feed_forward(shape.shared_dim) if shape.shared_dim else None
        return Experts(shape.hidden_dim, shape.inner_dim, traits, GATED[shape.activation], shape.route_bias, shared)

    def forward(self, *arguments: Any, loss_scale: float = 1.0, **options: Any) -> Tensor:
        """See `Decoder`. Routers are given what training minimises."""
        per_sample = None
        if self.objective.preference is not None and self.losses_per_sample is not None:
            per_sample = self.losses_per_sample / self.sample_sums.ranks
        for router in self.routers.values():
            router.objective, router.loss_scale, router.losses_per_sample = self.objective, loss_scale, per_sample
        return super().forward(*arguments, loss_scale=loss_scale, **options)

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
        """See `Decoder`. The gradient is that of weight / D times the losses of D modules (equation 25)."""
        losses, counts = list[Tensor](), list[Tensor]()
        scale = loss_scale * self.objective.mtp_weight / self.shape.mtp_layers
        options: dict[str, Any] = {"skip_negative": True, "cap": self.shape.logit_cap}
        for number, module in enumerate(self.mtp.values(), start=1):
            tokens = tokens_ahead(inputs_BT, targets_BT, number, documents)
            read_BT, ahead_BT = self.select_tokens(tokens.read), self.select_tokens(tokens.targets)
            embedded_BTD, _ = self.vocabulary.embed(self.tok.weight, read_BT, None)
            x_BTD = module(x_BTD, embedded_BTD, self.rows_T, angles[-1], documents)
            reads = self.for_head(x_BTD), weight_VD, ahead_BT, self.head_chunk_tokens
            losses.append(self.vocabulary.loss(*reads, scale, None, **options))
            counts.append((tokens.targets >= 0).sum())
        total, wide = torch.stack(losses).sum(), wide_dtype(x_BTD.device)
        self.objective_sums = torch.stack([total.detach().to(wide), torch.stack(counts).sum().to(wide)])[None]
        return total

    def angles(
        self, inputs: Tensor, positions_BT: Tensor | None, dtype: torch.dtype, documents: DocumentBounds | None = None
    ) -> Sequence[Tensor]:
        """See `Decoder`."""
        places_BT = None if documents is None else self.select_places(documents.positions_BT, self.tokens_T)
        found = [self._angles(one, inputs, positions_BT, dtype, places_BT) for one in self.positions]
        return [found[number] for number in self.position_of]

    def _angles(
        self,
        one: RotaryTables,
        inputs: Tensor,
        positions_BT: Tensor | None,
        dtype: torch.dtype,
        places_BT: Tensor | None,
    ) -> Tensor:
        turns_TC2: Tensor = one.turns.on(inputs.device, torch.promote_types(dtype, torch.float32))
        if positions_BT is not None:
            return turns_TC2[positions_BT]
        if places_BT is not None:
            return turns_TC2[places_BT]
        if self.tokens_T is not None:
            return turns_TC2[self.tokens_T.to(inputs.device)]
        # With sequence parallelism a later stage receives only some of the rows, but attention reads all rows.
        known = self.embeds or self.rows_T is None
        return turns_TC2[: inputs.shape[1]] if known else turns_TC2
