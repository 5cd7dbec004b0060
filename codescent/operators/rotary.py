"""In: positions; queries and keys. Out: queries and keys, turned by angles that grow with the position (RoPE).
Does not compute frequencies (frequencies.py does) or know which positions a rank holds: the model passes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from codescent.operators import compiled
from codescent.operators.compiled import compiled_off_cpu, plain_inference
from codescent.operators.frequencies import frequencies, gain_of
from codescent.plan.model import RopeScaling

# Shapes: T positions (or B x T), C = head_dim / 2 pairs of channels, 2: cosine and sine, or the two channels of a pair,
# which are the real and the imaginary part of a complex number. In attention: B samples, T positions, G groups, R query
# heads of a group, E = R + 2, K head_dim.


def turns(
    frequencies_C: Tensor, positions: Tensor, dtype: torch.dtype, gain: float = 1.0, turned: int | None = None
) -> Tensor:
    """Cosine and sine of each angle, times `gain`, for activations of this dtype: [.., C, 2], in at least fp32.

    `frequencies_C` are on the device of the positions. `turned`: pairs that turn, the first ones; None: all. Others
    stay as they are, without the gain. Angles are computed in fp64: at position 100,000 an angle in
    fp32 has an error of 0.004.
    """
    angles = positions[..., None] * frequencies_C
    both_TC2 = gain * torch.stack([angles.cos(), angles.sin()], -1)
    both_TC2[..., turned or len(frequencies_C) :, 0] = 1.0
    return both_TC2.to(torch.promote_types(dtype, torch.float32))


def every_turn(
    seq_len: int, head_dim: int, theta: float, scaling: RopeScaling | None = None, rotary_dim: int = 0
) -> Tensor:
    """`turns` of the positions 0 to seq_len - 1 in fp64, for a `Table`. `rotary_dim`: see `frequencies`."""
    rates_C, turned = frequencies(head_dim, theta, scaling, seq_len, rotary_dim), (rotary_dim or head_dim) // 2
    return turns(rates_C, torch.arange(seq_len), torch.float64, gain_of(scaling), turned)


def turn(qkv_BTGEK: Tensor, turns_TC2: Tensor) -> Tensor:
    """Turn queries and keys; values stay as they are.

    Channels 2c and 2c + 1 are a pair, as in RoFormer and in Meta's code. (transformers pairs c with c + head_dim / 2,
    so its matrices have another order of rows.) Computed in at least fp32 and rounded once. `turns_TC2` may differ
    between samples: [B, T, C, 2].
    """
    if torch.compiler.is_compiling():
        qk_BTGRK, v_BTG1K = qkv_BTGEK[..., :-1, :], qkv_BTGEK[..., -1:, :]
        return torch.cat([_turned_real(qk_BTGRK, turns_TC2), v_BTG1K], -2)
    if plain_inference():
        return _turned(qkv_BTGEK, turns_TC2, back=False)
    turned_BTGEK: Tensor = _Turn.apply(qkv_BTGEK, turns_TC2)  # type: ignore[no-untyped-call]
    return turned_BTGEK


class _Turn(torch.autograd.Function):
    """See `turn`. Backward turns the gradient by the opposite angle."""

    @staticmethod
    def forward(ctx: Any, qkv_BTGEK: Tensor, turns_TC2: Tensor) -> Tensor:
        ctx.save_for_backward(turns_TC2)
        return _turned(qkv_BTGEK, turns_TC2, back=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_BTGEK: Tensor) -> tuple[Tensor, None]:
        (turns_TC2,) = ctx.saved_tensors
        return _turned(d_BTGEK, turns_TC2, back=True), None


def _turned(qkv_BTGEK: Tensor, turns_TC2: Tensor, *, back: bool) -> Tensor:
    """A product of complex numbers. On CUDA, where this would move 8 times as much, it is one kernel."""
    if compiled.fuses(qkv_BTGEK.device):
        return _turned_alone(qkv_BTGEK, turns_TC2, back=back)
    turns_TC, wide = torch.view_as_complex(turns_TC2), turns_TC2.dtype
    turns_T11C = (turns_TC.conj() if back else turns_TC)[..., None, None, :]
    qk_BTGRK, out_BTGEK = qkv_BTGEK[..., :-1, :], torch.empty_like(qkv_BTGEK, memory_format=torch.contiguous_format)
    out_BTGEK[..., -1, :] = qkv_BTGEK[..., -1, :]
    if qkv_BTGEK.dtype == wide:
        torch.mul(_complex(qk_BTGRK), turns_T11C, out=_complex(out_BTGEK[..., :-1, :]))
    else:
        product_BTGRC = _complex(qk_BTGRK.to(wide)).mul_(turns_T11C)
        out_BTGEK[..., :-1, :] = torch.view_as_real(product_BTGRC).flatten(-2)
    return out_BTGEK


@compiled_off_cpu
def _turned_alone(qkv_BTGEK: Tensor, turns_TC2: Tensor, *, back: bool) -> Tensor:
    """`_turned` in real numbers, as one kernel: it computes each element where it is written, and joins no parts."""
    pairs_BTGEC2 = qkv_BTGEK.view(*qkv_BTGEK.shape[:-1], -1, 2)
    turns_T11C2 = turns_TC2[..., None, None, :, :]
    cosine_T11C1, sine_T11C1 = turns_T11C2[..., :1], turns_T11C2[..., 1:]
    signs_2 = torch.arange(-1, 2, 2, device=qkv_BTGEK.device)  # of the other channel of a pair
    other_BTGEC2 = pairs_BTGEC2.flip(-1) * (sine_T11C1 * (-signs_2 if back else signs_2))
    turned_BTGEC2 = (pairs_BTGEC2 * cosine_T11C1 + other_BTGEC2).to(qkv_BTGEK.dtype)
    heads = qkv_BTGEK.shape[3]
    is_value_E11 = (torch.arange(heads, device=qkv_BTGEK.device) == heads - 1)[:, None, None]
    return torch.where(is_value_E11, pairs_BTGEC2, turned_BTGEC2).flatten(-2)


def _complex(x_K: Tensor) -> Tensor:
    return torch.view_as_complex(x_K.view(*x_K.shape[:-1], -1, 2))


def _turned_real(x_BTGRK: Tensor, turns_TC2: Tensor) -> Tensor:
    """`_Turn` in real numbers: torch's compiler generates no code for complex numbers."""
    cosine_T11C, sine_T11C = turns_TC2[..., None, None, :, :].unbind(-1)
    a, b = x_BTGRK.to(turns_TC2.dtype).view(*x_BTGRK.shape[:-1], -1, 2).unbind(-1)
    pairs = torch.stack([a * cosine_T11C - b * sine_T11C, a * sine_T11C + b * cosine_T11C], -1)
    return pairs.flatten(-2).to(x_BTGRK.dtype)
