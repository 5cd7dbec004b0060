"""In: sizes of rotary positions, how they are scaled. Out: the frequency of each pair of channels, a factor.
Does not turn queries and keys: rotary.py does."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from codescent.plan.model import RopeScaling

# Shapes: C = head_dim / 2 pairs of channels.


def frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None = None, seq_len: int = 0, rotary_dim: int = 0
) -> Tensor:
    """fp64 [C]: radians per position of each pair of channels.

    theta^(-2c / head_dim) (Su et al. 2021, "RoFormer", equation 15). `scaling` changes them; None: nothing does.
    `seq_len`: positions of the model's longest sample, which longrope reads. `rotary_dim`: the channels that turn, the
    first ones; 0: all. The formula has them in the place of head_dim, and the frequencies of the others are 0.
    """
    channels = rotary_dim or head_dim
    plain_C = theta ** -(torch.arange(0, channels, 2, dtype=torch.float64) / channels)
    found_C = plain_C if scaling is None else _SCALED[scaling.method](plain_C, theta, scaling, seq_len)
    return torch.nn.functional.pad(found_C, (0, (head_dim - channels) // 2))


def gain_of(scaling: RopeScaling | None) -> float:
    """The factor on turned queries and keys.

    yarn: 0.1 ln(factor) + 1 (Peng et al. 2023, "YaRN", equation 22). longrope: sqrt(1 + ln(factor) /
    ln(original_seq_len)) (Ding et al. 2024, "LongRoPE", the released code). 1 for other methods.
    """
    if scaling is None or scaling.method not in ("yarn", "longrope"):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.factor <= 1.0:
        return 1.0
    grows = math.log(scaling.factor)
    if scaling.method == "yarn":
        return 0.1 * grows + 1.0
    return math.sqrt(1.0 + grows / math.log(scaling.original_seq_len))


def _linear(plain_C: Tensor, theta: float, scaling: RopeScaling, seq_len: int) -> Tensor:
    """Chen et al. 2023, "Extending Context Window via Positional Interpolation", equation 4."""
    return plain_C / scaling.factor


def _llama3(plain_C: Tensor, theta: float, scaling: RopeScaling, seq_len: int) -> Tensor:
    """Long waves are divided by the factor, short ones stay; between both the change is linear in the waves.

    Source: meta-llama/llama-models, models/llama3/model.py, apply_scaling.
    """
    waves_C = scaling.original_seq_len * plain_C / (2.0 * math.pi)
    share_C = (waves_C - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return torch.lerp(plain_C / scaling.factor, plain_C, share_C.clamp(0.0, 1.0))


def _yarn(plain_C: Tensor, theta: float, scaling: RopeScaling, seq_len: int) -> Tensor:
    """As llama3, but the change is linear in the number of the pair (Peng et al. 2023, "YaRN", section 3.2).

    The ends are the pairs that have `beta_fast` and `beta_slow` waves in `original_seq_len`.
    """
    pairs = len(plain_C)
    turned = scaling.original_seq_len / (2.0 * math.pi)
    first, last = (pairs * math.log(turned / beta) / math.log(theta) for beta in (scaling.beta_fast, scaling.beta_slow))
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    width = last - first or 0.001  # as transformers does, where both ends are one pair
    share_C = ((torch.arange(pairs, dtype=torch.float64) - first) / width).clamp(0.0, 1.0)
    return torch.lerp(plain_C, plain_C / scaling.factor, share_C)


def _longrope(plain_C: Tensor, theta: float, scaling: RopeScaling, seq_len: int) -> Tensor:
    """A divisor for each pair (Ding et al. 2024, "LongRoPE"), from one of two lists by the model's length."""
    factors = scaling.long_factors if seq_len > scaling.original_seq_len else scaling.short_factors
    return plain_C / torch.tensor(factors, dtype=torch.float64)


_SCALED: Mapping[str, Callable[[Tensor, float, RopeScaling, int], Tensor]] = {
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
