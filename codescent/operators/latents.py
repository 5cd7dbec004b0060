"""In: the latents of queries, and of keys and values (multi-head latent attention). Out: normed latents; queries, keys
and values of all heads in one tensor.
Does not multiply by matrices or compute attention: latent_attention.py does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Shapes: B samples, T positions, H heads; others see `LatentSizes`: Q queries, L keys_values, P turning, C still, K
# channels, V values; A = Q + L + P, X = L + P, R = C + V.
LATENT_EPS = 1e-6
"""What the norms of latents add to the mean square: DeepSeek's and transformers' classes do not read rms_norm_eps."""


@dataclass(frozen=True)
class LatentSizes:
    """Sizes of multi-head latent attention.

    Attributes:
        heads: of queries, keys and values.
        channels: of a query and of a key.
        turning: how many of them turn with the position, the first ones. All heads share these of a key.
        values: channels of a value, at most `channels`.
        keys_values: channels of the latent of keys and values.
        queries: channels of the latent of queries; 0: they have none.
    """

    heads: int
    channels: int
    turning: int
    values: int
    keys_values: int
    queries: int = 0

    @property
    def still(self) -> int:
        """Channels of a query or key that do not turn."""
        return self.channels - self.turning

    @property
    def up_rows(self) -> int:
        """Rows of a head in the matrix of keys and values."""
        return self.still + self.values

    @property
    def entry(self) -> int:
        """Channels of what the heads share: the latent of keys and values, and the key that turns."""
        return self.keys_values + self.turning

    @property
    def down_rows(self) -> int:
        """Rows of the matrix of all latents."""
        return self.queries + self.entry


def normed(latents_BTA: Tensor, q_Q: Tensor | None, kv_L: Tensor) -> tuple[Tensor | None, Tensor]:
    """RMSNorm of both latents: [B, T, Q] of queries (None: there are none), and [B, T, L + P] with the shared key.

    Computed in at least fp32 and rounded once. `q_Q`, `kv_L`: the scales.
    """
    if q_Q is None:
        alone_BTX: Tensor = _NormedAlone.apply(latents_BTA, kv_L)  # type: ignore[no-untyped-call]
        return None, alone_BTX
    both: tuple[Tensor, Tensor] = _Normed.apply(latents_BTA, q_Q, kv_L)  # type: ignore[no-untyped-call]
    return both


def _forward(x_BTA: Tensor, scales: tuple[Tensor, ...]) -> tuple[list[Tensor], Tensor]:
    """The normed parts, the last one with what follows the latents; and 1 / root mean square of each part of a row."""
    wide, at, parts, rates = torch.promote_types(x_BTA.dtype, torch.float32), 0, list[Tensor](), list[Tensor]()
    for number, scale in enumerate(scales, start=1):
        part = x_BTA[..., at : at + len(scale)].to(wide)
        rates.append((part.square().mean(-1, keepdim=True) + LATENT_EPS).rsqrt())
        at += len(scale)
        beside = x_BTA.shape[-1] - at if number == len(scales) else 0
        y = x_BTA.new_empty(*x_BTA.shape[:-1], len(scale) + beside)
        y[..., : len(scale)] = part * rates[-1] * scale.to(wide)
        parts.append(y)
    parts[-1][..., len(scales[-1]) :] = x_BTA[..., at:]
    return parts, torch.cat(rates, -1)


def _backward(
    gradients: tuple[Tensor, ...], x_BTA: Tensor, scales: tuple[Tensor, ...], rates_BT2: Tensor
) -> tuple[Tensor, ...]:
    """The gradients of the latents, and of each scale."""
    d_x_BTA, found, at = torch.empty_like(x_BTA), list[Tensor](), 0
    for scale, d_y, rates_BT1 in zip(scales, gradients, torch.split(rates_BT2, 1, -1), strict=True):
        width = len(scale)
        unit = x_BTA[..., at : at + width].to(rates_BT1.dtype) * rates_BT1
        d_part = d_y[..., :width].to(rates_BT1.dtype)
        found.append((d_part * unit).flatten(0, -2).sum(0).to(scale.dtype))
        d_unit = d_part * scale.to(rates_BT1.dtype)
        d_x_BTA[..., at : at + width] = (d_unit - unit * (d_unit * unit).mean(-1, keepdim=True)) * rates_BT1
        at += width
    d_x_BTA[..., at:] = gradients[-1][..., len(scales[-1]) :]
    return d_x_BTA, *found


class _Normed(torch.autograd.Function):
    """See `normed`. Forward saves the latents, and a number of each part of a row."""

    @staticmethod
    def forward(ctx: Any, x_BTA: Tensor, *scales: Tensor) -> tuple[Tensor, ...]:
        parts, rates_BT2 = _forward(x_BTA, scales)
        ctx.save_for_backward(x_BTA, rates_BT2, *scales)
        return tuple(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        x_BTA, rates_BT2, *scales = ctx.saved_tensors
        return _backward(gradients, x_BTA, tuple(scales), rates_BT2)


class _NormedAlone(_Normed):
    """The same of latents of keys and values alone: autograd takes one tensor for one result."""

    @staticmethod
    def forward(ctx: Any, x_BTA: Tensor, *scales: Tensor) -> Tensor:  # type: ignore[override]
        return _Normed.forward(ctx, x_BTA, *scales)[0]


def turned(x: Tensor, turns: Tensor, *, back: bool = False) -> Tensor:
    """Turn pairs of channels, 2c and 2c + 1, in at least fp32: see `rotary.turn`. `turns`: [.., pairs, 2]."""
    cosine, sine = turns.unbind(-1)
    a, b = torch.unflatten(x.to(turns.dtype), -1, (-1, 2)).unbind(-1)
    sine = -sine if back else sine
    return torch.stack([a * cosine - b * sine, a * sine + b * cosine], -1).flatten(-2).to(x.dtype)


def joined(q_BTW: Tensor, kv_BTW: Tensor, shared_BTP: Tensor, turns_TC2: Tensor, sizes: LatentSizes) -> Tensor:
    """Queries, keys and values head by head, as attention reads them: [B, T, H, 3, K]. It turns queries and keys.

    Values with fewer channels than keys are followed by zeros. Backward reads the angles alone.
    """
    qkv_BTH3K: Tensor = _Joined.apply(q_BTW, kv_BTW, shared_BTP, turns_TC2, sizes)  # type: ignore[no-untyped-call]
    return qkv_BTH3K


class _Joined(torch.autograd.Function):
    """See `joined`. The gradient of the shared key is the sum of those of all heads."""

    @staticmethod
    def forward(
        ctx: Any, q_BTW: Tensor, kv_BTW: Tensor, shared_BTP: Tensor, turns_TC2: Tensor, sizes: LatentSizes
    ) -> Tensor:
        ctx.save_for_backward(turns_TC2)
        ctx.sizes, turning = sizes, sizes.turning
        q_BTHK = torch.unflatten(q_BTW, 2, (-1, sizes.channels))
        kv_BTHR = torch.unflatten(kv_BTW, 2, (-1, sizes.up_rows))
        out_BTH3K = q_BTW.new_empty(*q_BTHK.shape[:3], 3, sizes.channels)
        out_BTH3K[..., 0, :turning] = turned(q_BTHK[..., :turning], turns_TC2[..., None, :, :])
        out_BTH3K[..., 0, turning:] = q_BTHK[..., turning:]
        out_BTH3K[..., 1, :turning] = turned(shared_BTP, turns_TC2)[:, :, None]
        out_BTH3K[..., 1, turning:] = kv_BTHR[..., : sizes.still]
        out_BTH3K[..., 2, : sizes.values] = kv_BTHR[..., sizes.still :]
        out_BTH3K[..., 2, sizes.values :] = 0.0
        return out_BTH3K

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_BTH3K: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        (turns_TC2,), sizes = ctx.saved_tensors, ctx.sizes
        turning = sizes.turning
        d_q_BTHK, d_k_BTHK, d_v_BTHK = d_BTH3K.unbind(3)
        d_turning_BTHP = turned(d_q_BTHK[..., :turning], turns_TC2[..., None, :, :], back=True)
        d_q_BTW = torch.cat([d_turning_BTHP, d_q_BTHK[..., turning:]], -1).flatten(2)
        d_kv_BTW = torch.cat([d_k_BTHK[..., turning:], d_v_BTHK[..., : sizes.values]], -1).flatten(2)
        d_shared_BTP = d_k_BTHK[..., :turning].sum(2, dtype=turns_TC2.dtype)
        return d_q_BTW, d_kv_BTW, turned(d_shared_BTP, turns_TC2, back=True).to(d_q_BTW.dtype), None, None
