"""In: this rank's queries, any one rank's keys and values. Out: causal attention of the queries to these keys, tile by
tile (a tile: a block of queries and a range of keys); also `balanced_positions`: which positions each rank holds.
Does not send anything: ring.py exchanges keys and values between ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from codescent.operators import products
from codescent.operators.block_attention import PLAIN, ScoreTraits
from codescent.operators.dropout import dropped_at
from codescent.operators.soft_cap import cap_

# Shapes: B samples, G key-value heads, P = B * G pairs of sample and key-value head, R query heads that read the same
# key-value head, T positions of a rank, K head_dim; in a tile: Q queries, N = R * Q rows, S keys.
BLOCK_QUERIES = 128  # queries of one head in a tile: at most [P, R * 128, T] probabilities are in memory


def balanced_positions(seq_len: int, degree: int, index: int, device: torch.device | None = None) -> Tensor:
    """int64 [seq_len / degree]: the positions of rank `index`, ascending.

    The sequence is cut into 2 * degree parts, and rank i has parts i and 2 * degree - 1 - i. One is an
    early part and one a late part, and each such pair attends to the same number of keys. So under a causal mask every
    rank has the same work. Sources: Llama team 2024, "The Llama 3 Herd of Models", section 3.3.2; Zhu 2024,
    ring-flash-attention, "zigzag".

    Raises:
        ValueError: the parts would not be equally long.
    """
    if seq_len % (2 * degree) != 0:
        raise ValueError(f"{seq_len} positions cannot be cut into 2 * {degree} equal parts")
    part = seq_len // (2 * degree)
    of_first = torch.arange(part, device=device)
    return torch.cat([of_first + index * part, of_first + (2 * degree - 1 - index) * part])


@dataclass(frozen=True)
class Tile:
    """A slice of this rank's queries, and a slice of the keys of one source rank. Indices count from 0 on each rank.

    `causal`: the tile's last keys are at the positions of its queries, and a query sees no later key. If not `causal`,
    each query sees all keys of the tile.
    """

    queries: slice
    keys: slice
    causal: bool


@dataclass(frozen=True)
class CausalTiles:
    """Attention of the queries of rank `index` to the keys and values of each source rank, tile by tile.

    `degree`: ranks of the group. `length`: T. `keys_B`, `dropout`, `first_head` and `scores`: see
    `ring.split_attention`. `begins_BT`: see `operators.documents`, of all positions; None: a sample is one document.
    """

    degree: int
    index: int
    length: int
    keys_B: Tensor | None = None
    dropout: float = 0.0
    first_head: int = 0
    scores: ScoreTraits = PLAIN
    begins_BT: Tensor | None = None

    def __post_init__(self) -> None:
        if self.length % 2 != 0:
            raise ValueError(f"{self.length} positions of a rank cannot be divided into two parts, equally long")

    @property
    def kept_scale(self) -> float:
        """Factor on the probabilities that are not dropped."""
        return 1.0 if self.keys_B is None else 1.0 / (1.0 - self.dropout)

    @property
    def hides(self) -> bool:
        """Whether a query of a tile may see none of its keys."""
        return self.scores.window > 0 or self.begins_BT is not None

    def positions(self, rank: int, device: torch.device) -> Tensor:
        """int64 [T]: the positions that a rank holds."""
        return balanced_positions(self.degree * self.length, self.degree, rank, device)

    def tiles(self, source: int) -> Iterator[Tile]:
        """The tiles in which this rank's queries see keys of the rank `source`.

        If `source` is an earlier rank, every query sees the first half of its keys. If it is a later rank, only the
        second half of the queries sees its keys, all of them. On a CPU, keys before the documents of all queries of a
        tile are left out; elsewhere the host would wait for the device to know them.
        """
        firsts_T = None
        if self.begins_BT is not None and self.begins_BT.device.type == "cpu":
            begins_T = self.begins_BT.amin(0)[self.positions(self.index, self.begins_BT.device)]
            firsts_T = torch.searchsorted(self.positions(source, self.begins_BT.device), begins_T)
        for tile in self._causal_tiles(source):
            first = 0 if firsts_T is None else int(firsts_T[tile.queries.start])
            if first < tile.keys.stop:
                yield Tile(tile.queries, slice(first, tile.keys.stop), tile.causal)

    def _causal_tiles(self, source: int) -> Iterator[Tile]:
        half = self.length // 2
        first = half if source > self.index else 0
        for start in range(first, self.length, BLOCK_QUERIES):
            stop = min(start + BLOCK_QUERIES, self.length)
            seen = stop if source == self.index else half if source < self.index else self.length
            yield Tile(slice(start, stop), slice(0, seen), causal=source == self.index)

    def attend_(self, source: int, q_PRTK: Tensor, kv_2PTK: Tensor, y_PRTK: Tensor, lse_PRT: Tensor) -> None:
        """Merge the attention to one source rank into y and lse, in place.

        The softmax over all keys is computed from the softmax of each part and the logarithm of its sum (Milakov and
        Gimelshein 2018, "Online normalizer calculation for softmax"). Dropout does not change these sums.

        Args:
            source: rank of the keys and values.
            q_PRTK: queries divided by sqrt(K).
            kv_2PTK: keys and values.
            y_PRTK: attention output over the sources so far, without `kept_scale`; zeros at first.
            lse_PRT: log(sum(exp(score))) over the sources so far; -inf at first.
        """
        k_PTK, v_PTK = kv_2PTK
        for tile in self.tiles(source):
            v_PSK = v_PTK[:, tile.keys]
            scores_PNS, _ = self._scores(source, q_PRTK, k_PTK, tile, y_PRTK.dtype)
            top_PN1 = scores_PNS.amax(-1, keepdim=True)
            if self.hides:  # a query may see none of these keys: its share of the softmax is 0 then
                top_PN1.clamp_(min=torch.finfo(top_PN1.dtype).min / 2)
            p_PNS = scores_PNS.sub_(top_PN1).exp_()
            sum_PN1 = p_PNS.sum(-1, keepdim=True)
            if self.keys_B is not None:
                p_PNS.masked_fill_(self._dropped(self.keys_B, source, tile, p_PNS), 0.0)
            if self.hides:
                sum_PN1.clamp_(min=torch.finfo(sum_PN1.dtype).tiny)
            new_PNK = products.bmm(p_PNS.to(v_PSK.dtype), v_PSK).to(y_PRTK.dtype) / sum_PN1
            y_PRQK, lse_PRQ = y_PRTK[:, :, tile.queries], lse_PRT[:, :, tile.queries]
            new_lse_PRQ = top_PN1.add_(sum_PN1.log_()).view_as(lse_PRQ)
            y_PRQK.lerp_(new_PNK.view_as(y_PRQK), torch.sigmoid(new_lse_PRQ - lse_PRQ).unsqueeze(-1))
            lse_PRQ.copy_(torch.logaddexp(lse_PRQ, new_lse_PRQ))

    def attend_backward_(
        self,
        source: int,
        q_PRTK: Tensor,
        kv_2PTK: Tensor,
        lse_PRT: Tensor,
        d_y_PRTK: Tensor,
        delta_PRT: Tensor,
        d_q_PRTK: Tensor,
        d_kv_2PTK: Tensor,
    ) -> None:
        """Add the gradients of the attention to one source rank to d_q and d_kv, in place. Recomputes probabilities.

        `lse_PRT`: over all sources. `d_y_PRTK`: the output's gradient times `kept_scale`. `delta_PRT`: the sum of
        y * d_y over K, which equals the sum of p * d_p over all keys (Dao 2023, "FlashAttention-2", section 3.1).
        `d_q_PRTK`: gradient of the queries divided by sqrt(K). It and `d_kv_2PTK` are in the wide dtype.
        """
        k_PTK, v_PTK = kv_2PTK
        d_k_PTK, d_v_PTK = d_kv_2PTK
        for tile in self.tiles(source):
            k_PSK, v_PSK = k_PTK[:, tile.keys], v_PTK[:, tile.keys]
            q_PNK, d_y_PNK = _rows(q_PRTK, tile), _rows(d_y_PRTK, tile)
            scores_PNS, slope_PNS = self._scores(source, q_PRTK, k_PTK, tile, d_q_PRTK.dtype)
            p_PNS = scores_PNS.sub_(_rows(lse_PRT, tile).unsqueeze(-1)).exp_()
            d_p_PNS = products.bmm(d_y_PNK, v_PSK.transpose(1, 2)).to(d_q_PRTK.dtype)
            kept_PNS = p_PNS
            if self.keys_B is not None:
                dropped_PNS = self._dropped(self.keys_B, source, tile, p_PNS)
                kept_PNS = p_PNS.masked_fill(dropped_PNS, 0.0)
                d_p_PNS.masked_fill_(dropped_PNS, 0.0)
            d_v_PTK[:, tile.keys] += products.bmm(kept_PNS.to(v_PSK.dtype).transpose(1, 2), d_y_PNK)
            d_s_PNS = d_p_PNS.sub_(_rows(delta_PRT, tile).unsqueeze(-1)).mul_(p_PNS)
            d_s_PNS = (d_s_PNS if slope_PNS is None else d_s_PNS.mul_(slope_PNS)).to(k_PSK.dtype)
            d_q_PRQK = d_q_PRTK[:, :, tile.queries]
            d_q_PRQK += products.bmm(d_s_PNS, k_PSK).view_as(d_q_PRQK)
            d_k_PTK[:, tile.keys] += products.bmm(d_s_PNS.transpose(1, 2), q_PNK)

    def _scores(
        self, source: int, q_PRTK: Tensor, k_PTK: Tensor, tile: Tile, wide: torch.dtype
    ) -> tuple[Tensor, Tensor | None]:
        """q k^T, capped, -inf where the key is later than the query, or before its window or its document; and the
        slope of the cap."""
        scores_PNS, slope_PNS = products.bmm(_rows(q_PRTK, tile), k_PTK[:, tile.keys].transpose(1, 2)), None
        if self.scores.cap:
            scores_PNS = scores_PNS.to(wide)
            slope_PNS = cap_(scores_PNS, self.scores.cap)
        scores_PNS = _masked(scores_PNS, len(q_PRTK), tile)
        if not self.hides:
            return scores_PNS.to(wide), slope_PNS
        queries_Q = self.positions(self.index, q_PRTK.device)[tile.queries]
        keys_S = self.positions(source, q_PRTK.device)[tile.keys]
        if self.scores.window:
            past_QS = queries_Q[:, None] - keys_S >= self.scores.window
            scores_PNS.view(len(q_PRTK), -1, *past_QS.shape).masked_fill_(past_QS, -math.inf)
        if self.begins_BT is not None:
            past_BQS = keys_S < self.begins_BT[:, queries_Q, None]
            by_sample = scores_PNS.view(len(past_BQS), -1, *past_BQS.shape[1:])
            by_sample.masked_fill_(past_BQS[:, None], -math.inf)
        return scores_PNS.to(wide), slope_PNS

    def _dropped(self, keys_B: Tensor, source: int, tile: Tile, p_PNS: Tensor) -> Tensor:
        """The same dropout mask as on one device: row = head * seq_len + query position, column = key position."""
        seq_len = self.degree * self.length
        num_heads = len(p_PNS) // len(keys_B) * p_PNS.shape[1] // (tile.queries.stop - tile.queries.start)
        queries_T, keys_T = (self.positions(rank, keys_B.device) for rank in (self.index, source))
        heads_H = torch.arange(self.first_head, self.first_head + num_heads, device=keys_B.device)
        rows_HQ = heads_H[:, None] * seq_len + queries_T[tile.queries]
        return dropped_at(keys_B, rows_HQ.flatten(), keys_T[tile.keys], self.dropout).view_as(p_PNS)


def _rows(of_PRT: Tensor, tile: Tile) -> Tensor:
    """The tile's queries, of all heads that read the same keys, head after head: [P, N, ...]."""
    return of_PRT[:, :, tile.queries].flatten(1, 2)


def _masked(scores_PNS: Tensor, pairs: int, tile: Tile) -> Tensor:
    """The scores, in place -inf where the key is later than the query. `pairs`: P."""
    if tile.causal:
        queries = tile.queries.stop - tile.queries.start
        later_QQ = torch.ones(queries, queries, dtype=torch.bool, device=scores_PNS.device).triu_(1)
        scores_PRQS = scores_PNS.view(pairs, -1, queries, tile.keys.stop - tile.keys.start)
        scores_PRQS[..., -queries:].masked_fill_(later_QQ, -math.inf)
    return scores_PNS
