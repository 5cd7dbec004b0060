"""In: this rank's queries, any one rank's keys and values. Out: causal attention of the queries to these keys by one
call of a fused kernel, merged with the attention to other ranks' keys; its gradients.
Does not send anything (ring.py does), and has no dropout and no fp64: causal_tiles.py has."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from codescent.operators.compiled import compiled_off_cpu
from codescent.operators.fused_attention import FusedAttention
from codescent.strategies.causal_tiles import Tile

# Shapes: B samples, H query heads, G key-value heads, T positions of a rank, K head_dim; of one call: Q queries.


@dataclass(frozen=True)
class CausalSources:
    """Attention of the queries of rank `index` to the keys and values of each source rank, by a fused kernel.

    The positions are those of `balanced_positions`: an early slice and a late slice, equally long. So no source needs
    a mask in memory. Its own keys: causal. Those of an earlier rank: every query sees the first half, and nothing of
    the second. Those of a later rank: the second half of the queries sees all of them (`tile`).

    `length`: T.
    """

    kernel: FusedAttention
    index: int
    length: int

    def tile(self, source: int) -> Tile:
        """The queries that see keys of the rank `source`, and these keys."""
        half = self.length // 2
        queries = slice(half if source > self.index else 0, self.length)
        return Tile(queries, slice(0, half if source < self.index else self.length), causal=source == self.index)

    def first(self, q_BHTK: Tensor, kv_2BGTK: Tensor) -> tuple[Tensor, Tensor]:
        """Attention to this rank's own keys: y in fp32, log(sum(exp(score))) [B, H, T]. Every query sees its key."""
        y_BHTK, lse_BHT = self.kernel.forward(q_BHTK, kv_2BGTK[0], kv_2BGTK[1], True)
        return y_BHTK.to(torch.promote_types(y_BHTK.dtype, torch.float32)), lse_BHT

    def attend_(self, source: int, q_BHTK: Tensor, kv_2BGTK: Tensor, y_BHTK: Tensor, lse_BHT: Tensor) -> None:
        """Merge the attention to another rank's keys into y and lse, in place."""
        tile = self.tile(source)
        k_BGSK, v_BGSK = kv_2BGTK[:, :, :, tile.keys]
        new_y_BHQK, new_lse_BHQ = self.kernel.forward(q_BHTK[:, :, tile.queries], k_BGSK, v_BGSK, tile.causal)
        _merge_(y_BHTK[:, :, tile.queries], lse_BHT[:, :, tile.queries], new_y_BHQK, new_lse_BHQ)

    def attend_backward_(
        self,
        source: int,
        q_BHTK: Tensor,
        kv_2BGTK: Tensor,
        y_BHTK: Tensor,
        lse_BHT: Tensor,
        d_y_BHTK: Tensor,
        d_q_BHTK: Tensor,
        d_kv_2BGTK: Tensor,
    ) -> None:
        """Add the gradients of the attention to one source rank to d_q and d_kv, in place.

        `y_BHTK`, `lse_BHT`: over all sources. `d_q_BHTK` and `d_kv_2BGTK` are in the wide dtype.
        """
        tile = self.tile(source)
        d_y_BHQK, q_BHQK, y_BHQK, lse_BHQ = (one[:, :, tile.queries] for one in (d_y_BHTK, q_BHTK, y_BHTK, lse_BHT))
        k_BGSK, v_BGSK = kv_2BGTK[:, :, :, tile.keys]
        parts = self.kernel.backward(d_y_BHQK, q_BHQK, k_BGSK, v_BGSK, y_BHQK, lse_BHQ, tile.causal)
        d_k_BGSK, d_v_BGSK = d_kv_2BGTK[:, :, :, tile.keys]
        for total, part in zip((d_q_BHTK[:, :, tile.queries], d_k_BGSK, d_v_BGSK), parts, strict=True):
            total += part


@compiled_off_cpu
def _merge_(y_BHQK: Tensor, lse_BHQ: Tensor, new_y_BHQK: Tensor, new_lse_BHQ: Tensor) -> None:
    """y and lse over more keys, in place (Milakov and Gimelshein 2018, "Online normalizer calculation for softmax")."""
    share_BHQ1 = torch.sigmoid(new_lse_BHQ - lse_BHQ).unsqueeze(-1)
    y_BHQK.lerp_(new_y_BHQK.to(y_BHQK.dtype), share_BHQ1)
    lse_BHQ.copy_(torch.logaddexp(lse_BHQ, new_lse_BHQ))
