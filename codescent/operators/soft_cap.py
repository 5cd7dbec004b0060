"""In: scores or logits, a cap. Out: cap * tanh(x / cap), between -cap and cap, and its slope.
Does not know what is capped: attention and the head do. Source: Gemma Team 2024, "Gemma 2", section 2."""

from __future__ import annotations

import torch
from torch import Tensor

from codescent.operators.compiled import compiled_off_cpu


def capped(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap), computed in at least fp32 and rounded once; x itself without a cap (0). Differentiable."""
    if not cap:
        return x
    wide = torch.promote_types(x.dtype, torch.float32)
    return (cap * torch.tanh(x.to(wide) / cap)).to(x.dtype)


@compiled_off_cpu
def cap_(x: Tensor, cap: float) -> Tensor:
    """Cap x in place. Returns the slope 1 - tanh(x / cap)^2 in the dtype of x. Not differentiable."""
    wide = torch.promote_types(x.dtype, torch.float32)
    tanh = torch.tanh(x.to(wide) / cap)
    x.copy_(tanh * cap)
    return (1.0 - tanh.square()).to(x.dtype)
