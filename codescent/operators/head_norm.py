"""In: queries, keys and values by head. Out: queries and keys after an RMSNorm, of each head or over all heads.
Does not know how heads are split over ranks: a strategy gives the function that adds numbers of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from codescent.operators.compiled import plain_inference

# Shapes: B samples, T positions, G groups of heads, E heads of a group (its queries, key and value), K head_dim; N
# heads of a group that are normed: all but the value. 2: the queries, and the keys.

SumRanks = Callable[[Tensor], Tensor]
"""[B, T, 2] of this rank's heads -> the sum over the ranks that share the heads."""


class Scale(nn.Module):
    """The weights of a norm. `HeadNorm` reads the scales of queries and of keys together."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))


class HeadNorm:
    """x / sqrt(mean of x^2 + eps) times a scale (Zhang and Sennrich 2019), of queries and keys.

    Attributes:
        eps: added to the mean square.
        offset: added to the scales, in the wide dtype.
        widths: channels of all queries and of all keys of the layer, over which the mean is taken (OLMo 2). None: over
            the channels of each head (Qwen 3).
        sum_ranks: set if heads are split over ranks; None: this rank has all heads.
    """

    def __init__(self, eps: float, widths: tuple[int, int] | None, offset: float = 0.0) -> None:
        self.eps, self.widths, self.offset = eps, widths, offset
        self.sum_ranks: SumRanks | None = None

    def __call__(self, qkv_BTGEK: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        """The same with normed queries and keys; values stay. Computed in at least fp32, and rounded once.

        `queries`, `keys`: their scales, [K] for norms of each head, else [all channels of this rank's heads].
        """
        if plain_inference():
            return _normed(qkv_BTGEK, queries, keys, self)[0]
        normed: Tensor = _HeadNorm.apply(qkv_BTGEK, queries, keys, self)  # type: ignore[no-untyped-call]
        return normed

    def means(self, numbers_BTGNK: Tensor) -> Tensor:
        """The mean of what is normed together: [B, T, G, N, 1], or [B, T, 1, N, 1] over all heads."""
        if self.widths is None:
            return numbers_BTGNK.mean(-1, keepdim=True)
        of_queries = numbers_BTGNK[..., :-1, :].sum((2, 3, 4))
        sums_BT2 = torch.stack([of_queries, numbers_BTGNK[..., -1, :].sum((2, 3))], -1)
        if self.sum_ranks is not None:
            sums_BT2 = self.sum_ranks(sums_BT2)
        mean_BTQ, mean_BT1 = (sums_BT2[..., n, None] / width for n, width in enumerate(self.widths))
        queries = numbers_BTGNK.shape[3] - 1
        return torch.cat([mean_BTQ.expand(-1, -1, queries), mean_BT1], -1)[:, :, None, :, None]

    def scale(self, queries: Tensor, keys: Tensor, heads: tuple[int, int, int], dtype: torch.dtype) -> Tensor:
        """The scales as [G or 1, N, K]. `heads`: G, N, K."""
        groups, normed, channels = heads
        if self.widths is None:
            both_1NK = torch.cat([queries.expand(normed - 1, channels), keys[None]])[None]
            return self._offset(both_1NK.to(dtype))
        both_GNK = torch.cat([queries.view(groups, normed - 1, channels), keys.view(groups, 1, channels)], 1)
        return self._offset(both_GNK.to(dtype))

    def _offset(self, scales: Tensor) -> Tensor:
        return scales + self.offset if self.offset else scales


class _HeadNorm(torch.autograd.Function):
    """See `HeadNorm`. Forward saves its input, and a number of each norm."""

    @staticmethod
    def forward(ctx: Any, qkv_BTGEK: Tensor, queries: Tensor, keys: Tensor, norm: HeadNorm) -> Tensor:
        normed_BTGEK, rates = _normed(qkv_BTGEK, queries, keys, norm)
        ctx.save_for_backward(qkv_BTGEK, queries, keys, _kept(rates, norm))
        ctx.norm = norm
        return normed_BTGEK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y_BTGEK: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        qkv_BTGEK, queries, keys, kept = ctx.saved_tensors
        norm: HeadNorm = ctx.norm
        groups, heads, channels = qkv_BTGEK.shape[2:]
        rates = _rates(kept, norm, heads - 1)
        unit_BTGNK, d_y_BTGNK = qkv_BTGEK[..., :-1, :] * rates, d_y_BTGEK[..., :-1, :].to(rates.dtype)
        d_scale_GNK = (d_y_BTGNK * unit_BTGNK).sum((0, 1))
        d_unit = d_y_BTGNK * norm.scale(queries, keys, (groups, heads - 1, channels), rates.dtype)
        d_x = (d_unit - unit_BTGNK * norm.means(d_unit * unit_BTGNK)) * rates
        d_queries, d_keys = d_scale_GNK[:, :-1], d_scale_GNK[:, -1]
        if norm.widths is None:
            d_queries, d_keys = d_queries.sum((0, 1)), d_keys.sum(0)
        d_scales = (d_queries.reshape(queries.shape).to(queries.dtype), d_keys.reshape(keys.shape).to(keys.dtype))
        return _joined(d_x, d_y_BTGEK), *d_scales, None


def _normed(qkv_BTGEK: Tensor, queries: Tensor, keys: Tensor, norm: HeadNorm) -> tuple[Tensor, Tensor]:
    """The result, and 1 / root mean square of what is normed together."""
    wide, (groups, heads, channels) = torch.promote_types(qkv_BTGEK.dtype, torch.float32), qkv_BTGEK.shape[2:]
    x_BTGNK = qkv_BTGEK[..., :-1, :].to(wide)
    rates = (norm.means(x_BTGNK.square()) + norm.eps).rsqrt()
    scale = norm.scale(queries, keys, (groups, heads - 1, channels), wide)
    return _joined(x_BTGNK * rates * scale, qkv_BTGEK), rates


def _joined(qk_BTGNK: Tensor, like_BTGEK: Tensor) -> Tensor:
    """Queries and keys in the dtype of the other, with its values."""
    out_BTGEK = torch.empty_like(like_BTGEK, memory_format=torch.contiguous_format)
    out_BTGEK[..., :-1, :] = qk_BTGNK
    out_BTGEK[..., -1, :] = like_BTGEK[..., -1, :]
    return out_BTGEK


def _kept(rates: Tensor, norm: HeadNorm) -> Tensor:
    """What backward needs of the rates: over all heads one of the queries and one of the keys, [B, T, 2]."""
    return rates if norm.widths is None else rates[:, :, 0, -2:, 0].clone()


def _rates(kept: Tensor, norm: HeadNorm, heads: int) -> Tensor:
    """The rates that `_kept` had."""
    if norm.widths is None:
        return kept
    of_queries_BT1, of_keys_BT1 = kept[..., :1], kept[..., 1:]
    return torch.cat([of_queries_BT1.expand(-1, -1, heads - 1), of_keys_BT1], -1)[:, :, None, :, None]
