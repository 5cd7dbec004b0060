"""In: an activation; hash keys of seed, step, sample and place in the model. Out: the activation after dropout.
Does not use a random generator: the mask is a hash of key, row and column, so it is the same in all layouts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from codescent.operators import compiled
from codescent.operators.compiled import compiled_off_cpu

# Shapes: B samples, R rows of a sample (positions, or heads x positions), W width of a row.
_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit number
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB
_GOLDEN_32 = -1640531527  # 0x9E3779B9 as a signed 32-bit number
_MIX_32_1 = -2048144789  # 0x85EBCA6B
_MIX_32_2 = -1028477387  # 0xC2B2AE35


def mix(state: Tensor) -> Tensor:
    """One round of SplitMix64 (Steele, Lea, Flood 2014) on int64: multiplication wraps, shifts are masked."""
    state = _wide(state) + _GOLDEN
    state = (state ^ ((state >> 30) & 0x3FFFFFFFF)) * _MIX_1
    state = (state ^ ((state >> 27) & 0x1FFFFFFFFF)) * _MIX_2
    return state ^ ((state >> 31) & 0x1FFFFFFFF)


def _wide(index: Tensor) -> Tensor:
    """The int64 itself; in compiled code the result of an operator that changes no bit.

    torch 2.11 compiles sums and products of an index for CUDA with 32 bits or with 64. A bit operator ends that: from
    here on there are 64.
    """
    return index & -1 if torch.compiler.is_compiling() else index


def sample_keys(seed: int, step: int, sample_ids_B: Tensor) -> Tensor:
    """int64 [B]: the key of each sample in this step."""
    # `full` writes the number on the device; a tensor made from a Python number would be copied there, and waited for.
    run = mix(torch.full((), seed, dtype=torch.int64, device=sample_ids_B.device))
    return mix(mix(run ^ step) ^ sample_ids_B.to(torch.int64))


def site_keys(keys_B: Tensor, num_sites: int) -> Tensor:
    """int64 [num_sites, B]: the key of each sample at each site, a place of the model that drops activations."""
    sites = torch.arange(num_sites, dtype=torch.int64, device=keys_B.device)
    return mix(keys_B[None, :] ^ mix(sites)[:, None])


def dropped_at(keys_B: Tensor, rows_R: Tensor, columns_W: Tensor, probability: float) -> Tensor:
    """bool [B, R, W], True at dropped elements. Each element has its own hash of (key, row, column).

    The 64-bit key of the row is mixed once. Its two halves enter the 32-bit hash of the column before and between the
    rounds of murmur3's finaliser (Appleby). So no two rows have the same sequence. Rows (int64) and columns are
    indices in the whole activation.
    """
    return _dropped(_row_keys(keys_B, rows_R), columns_W, probability)


def drop(
    x_BRW: Tensor, keys_B: Tensor, probability: float, rows_R: Tensor | None = None, first_column: int = 0
) -> Tensor:
    """Dropout: set each element of x to zero with this probability, and multiply the others by 1 / (1 - probability).

    Args:
        x_BRW: rows of an activation, or a range of their columns.
        keys_B: one row of `site_keys`.
        probability: of being dropped.
        rows_R: indices of the rows of x in the whole activation; None: x has all rows.
        first_column: index of the first column of x in the whole activation.
    """
    _, rows, width = x_BRW.shape
    if rows_R is None:
        rows_R = torch.arange(rows, device=keys_B.device)
    if not torch.compiler.is_compiling() and compiled.fuses(x_BRW.device):
        keys_BR = _row_keys_alone(keys_B, rows_R)
        y_BRW: Tensor = _Drop.apply(x_BRW, keys_BR, probability, first_column)  # type: ignore[no-untyped-call]
        return y_BRW
    columns_W = torch.arange(first_column, first_column + width, device=keys_B.device)
    return _scaled(x_BRW, dropped_at(keys_B, rows_R, columns_W, probability), probability)


class _Drop(torch.autograd.Function):
    """`drop` as one kernel. Backward hashes again: the mask, even as bytes, would be written once and read once."""

    @staticmethod
    def forward(ctx: Any, x_BRW: Tensor, keys_BR: Tensor, probability: float, first_column: int) -> Tensor:
        ctx.save_for_backward(keys_BR)
        ctx.options = probability, first_column
        return _drop_alone(x_BRW, keys_BR, *ctx.options)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y_BRW: Tensor) -> tuple[Tensor, None, None, None]:
        (keys_BR,) = ctx.saved_tensors
        return _drop_alone(d_y_BRW, keys_BR, *ctx.options), None, None, None


@compiled_off_cpu
def _drop_alone(x_BRW: Tensor, keys_BR: Tensor, probability: float, first_column: int) -> Tensor:
    columns_W = torch.arange(x_BRW.shape[-1], device=x_BRW.device) + first_column
    return _scaled(x_BRW, _dropped(keys_BR, columns_W, probability), probability)


def _row_keys(keys_B: Tensor, rows_R: Tensor) -> Tensor:
    """int64 [B, R]."""
    return mix(keys_B[:, None] ^ mix(rows_R)[None, :])


_row_keys_alone = compiled_off_cpu(_row_keys)


def _halves(number: Tensor) -> tuple[Tensor, Tensor]:
    """int32: the low and the high 32 bits of an int64, which is contiguous.

    `view` splits it: torch 2.13's compiler wrongly vectorises arithmetic from int64 to int32 on CPUs.
    """
    parts = number.view(torch.int32)
    return parts[..., ::2], parts[..., 1::2]


def _dropped(keys_BR: Tensor, columns_W: Tensor, probability: float) -> Tensor:
    """See `dropped_at`. `keys_BR`: of `_row_keys`."""
    low_BR, high_BR = _halves(keys_BR)
    turned_W = _halves(_wide(columns_W.to(torch.int64)) * _GOLDEN_32)[0]
    if turned_W.device.type == "cpu":
        turned_W = turned_W.contiguous()  # a CPU adds these a tenth faster
    hashed = low_BR[..., None] + turned_W
    hashed ^= (hashed >> 16) & 0xFFFF
    hashed *= _MIX_32_1
    hashed ^= high_BR[..., None]
    hashed ^= (hashed >> 13) & 0x7FFFF
    hashed *= _MIX_32_2
    hashed ^= (hashed >> 16) & 0xFFFF
    dropped_BRW: Tensor = hashed < round(probability * 2**32) - 2**31
    return dropped_BRW


def _scaled(x_BRW: Tensor, dropped_BRW: Tensor, probability: float) -> Tensor:
    return x_BRW.masked_fill(dropped_BRW, 0.0) * (1.0 / (1.0 - probability))
