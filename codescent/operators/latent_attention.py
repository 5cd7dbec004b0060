"""In: activations. Out: what multi-head latent attention (MLA) adds to the residual stream.
Does not norm or join latents (latents.py does), or compute attention itself (attention.py and cache.py do)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from codescent.operators.attention import AttentionCore, by_kind, causal_attention
from codescent.operators.block_attention import ScoreTraits
from codescent.operators.documents import DocumentBounds
from codescent.operators.head_norm import Scale
from codescent.operators.latents import LatentSizes, joined, normed, turned
from codescent.operators.linear import Linear, unpacked

if TYPE_CHECKING:
    from codescent.operators.cache import CachedToken, LayerCache

# Shapes: B samples, T positions, N new tokens of a pass with a cache, D hidden_dim, H heads, K channels of a query or
# key, of which the first P turn and C = K - P do not; V channels of a value, Q latent of queries, L latent of keys and
# values, A = Q + L + P all that `down` computes.


class LatentUp(Linear):
    """Keys that do not turn, and values, from their latents. The keys that turn come along: all heads share them.

    So ranks that divide the heads send each other both at once, and sum the gradients of both.
    `inputs`: channels of the latent.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, False)
        self.inputs = inputs

    def forward(self, latents_BTX: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """[B, T, H * (C + V)], head by head its key and its value; and the shared keys [B, T, P]."""
        if self.before is not None:
            latents_BTX = self.before(latents_BTX)
        y_BTW = self._product(latents_BTX[..., : self.inputs], None)
        if self.lora_magnitude is not None:
            y_BTW = self._with_magnitude(y_BTW, self.lora_magnitude)
        return y_BTW, latents_BTX[..., self.inputs :]

    def whole(self) -> Tensor:
        """The weight with its adapter: [H * (C + V), L]."""
        adapter = self.adapter
        if adapter is None:
            return unpacked(self.weight, self.packed)
        identity_LL = torch.eye(self.inputs, dtype=adapter.a_RI.dtype, device=self.weight.device)
        y_LW = self._product(identity_LL[None], None)
        if self.lora_magnitude is not None:
            y_LW = self._with_magnitude(y_LW, self.lora_magnitude)
        return y_LW[0].t()


class LatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-AI 2024, "DeepSeek-V2", section 2.1.2 and 2.1.3).

    Queries, and keys with values, are products of normed latents (equations 37, 38, 41, 42; 9 to 11). A part of each
    query turns with its position, and so does one key that all heads share (equations 39 and 43). The product of a
    query and a key is the sum of both parts, divided by the square root of their channels (equation 46).

    Attributes:
        sizes: of the latents and the heads.
        scores: window, cap and factor of the scores.
        recompute, core, first_head: see `attention.Attention`.
        down: the latents, and the shared key before it turns. Its rows: queries, keys and values, shared key.
        up: queries from their latents; `q`: from activations, if they have no latents.
        kv_up: keys and values.
    """

    def __init__(self, width: int, sizes: LatentSizes, scores: ScoreTraits) -> None:
        super().__init__()
        self.sizes, self.scores = sizes, scores
        self.cached_scores = replace(scores, width=scores.width or sizes.channels)  # entries have other channels
        self.recompute = False
        self.core: AttentionCore | None = None
        self.first_head = 0
        self.down = Linear(width, sizes.down_rows, False)
        self.down.reads_rows = True
        if sizes.queries:
            self.q_norm = Scale(sizes.queries)
        self.kv_norm = Scale(sizes.keys_values)
        if sizes.queries:
            self.q_up = Linear(sizes.queries, sizes.heads * sizes.channels, False)
        else:
            self.q = Linear(width, sizes.heads * sizes.channels, False)
        self.kv_up = LatentUp(sizes.keys_values, sizes.heads * sizes.up_rows)
        self.out = Linear(sizes.heads * sizes.values, width, False)

    def forward(
        self,
        x_BTD: Tensor,
        keys_B: Tensor | None = None,
        padding_BT: Tensor | None = None,
        cache: LayerCache | None = None,
        turns_TC2: Tensor | None = None,
        documents: DocumentBounds | None = None,
    ) -> Tensor:
        """See `attention.Attention.forward`. There is neither dropout nor padding, and angles are always given."""
        assert turns_TC2 is not None
        assert keys_B is None
        assert padding_BT is None
        scales = (self.q_norm.weight if self.sizes.queries else None, self.kv_norm.weight)
        q_latents_BTQ, latents_BTX = normed(self.down(x_BTD), *scales)
        q_BTW: Tensor = self.q(x_BTD) if q_latents_BTQ is None else self.q_up(q_latents_BTQ)
        y_BTD: Tensor
        if cache is not None:
            y_BTD = self.out(self._cached(q_BTW, latents_BTX, cache, turns_TC2))
            return y_BTD
        kv_BTW, shared_BTP = self.kv_up(latents_BTX)
        length = q_BTW.shape[1]
        turns_TC2 = turns_TC2 if turns_TC2.ndim > 3 else turns_TC2[:length]
        qkv_BTH3K = joined(q_BTW, kv_BTW, shared_BTP, turns_TC2, self.sizes)
        if self.core is None:
            y_BTD = self.out(causal_attention(qkv_BTH3K, self.recompute, self.scores, documents))
            return y_BTD
        q_BHTK, k_BTHK, v_BTHK = by_kind(qkv_BTH3K)
        y_BHTK = self.core(
            q_BHTK,
            k_BTHK.transpose(1, 2),
            v_BTHK.transpose(1, 2),
            keys_B=None,
            dropout=0.0,
            first_head=self.first_head,
            scores=self.scores,
            documents=documents,
        )
        y_BTD = self.out(y_BHTK.transpose(1, 2)[..., : self.sizes.values].flatten(2))
        return y_BTD

    @property
    def cached(self) -> CachedToken:
        """What a cache holds of a token: its latent and its shared key, of all heads together."""
        from codescent.operators.cache import CachedToken  # noqa: PLC0415 - cache.py imports attention.py

        return CachedToken(1, self.sizes.turning + self.sizes.keys_values, self.sizes.keys_values)

    def _cached(self, q_1NW: Tensor, latents_1NX: Tensor, cache: LayerCache, turns_NC2: Tensor) -> Tensor:
        """Attention to latents: [1, N, H * V]. Keys and values of earlier tokens are not computed.

        A key is W c. Its product with a query is that of c with W^T times the query. A sum of values W c is W times
        the sum of the latents c (DeepSeek-AI 2024, section 2.1.2, below equation 11).
        """
        sizes = self.sizes
        q_1NHK = torch.unflatten(q_1NW, 2, (-1, sizes.channels))
        up_HRL = torch.unflatten(self.kv_up.whole(), 0, (-1, sizes.up_rows))
        latents_1NL, shared_1NP = torch.split(latents_1NX, [sizes.keys_values, sizes.turning], -1)
        turning_1NHP, still_1NHC = torch.split(q_1NHK, [sizes.turning, sizes.still], -1)
        of_latents_1NHL = torch.einsum("bnhc,hcl->bnhl", still_1NHC, up_HRL[:, : sizes.still])
        queries_1NHX = torch.cat([turned(turning_1NHP, turns_NC2[..., None, :, :]), of_latents_1NHL], -1)
        entry_1NX = torch.cat([turned(shared_1NP, turns_NC2), latents_1NL], -1)
        found_1NW = cache.attend(torch.cat([queries_1NHX, entry_1NX[:, :, None]], 2)[:, :, None], self.cached_scores)
        sums_1NHL = torch.unflatten(found_1NW, 2, (-1, sizes.keys_values))
        return torch.einsum("bnhl,hvl->bnhv", sums_1NHL, up_HRL[:, sizes.still :]).flatten(2)
