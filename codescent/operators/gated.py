"""In: gates g and values u of a feed-forward. Out: SwiGLU and GEGLU with hand-written gradients, as `Activation`s.
Does not multiply by matrices (activations.py does, before and after)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from codescent.operators.activations import GELU_A, GELU_B, Activation, piece_size
from codescent.operators.linear import is_kept

# Shapes: B batch, T positions, N = B * T tokens, F ffn_dim, X elements of a piece; 2: the gate g, and the values u.
# swiglu(g, u) = silu(g) u,  silu(g) = g sigmoid(g)  (Shazeer 2020, "GLU Variants Improve Transformer", equation 6)
# geglu(g, u) = gelu(g) u  (the same equation), with gelu in its tanh form, as in activations.py

Piece = Callable[[Tensor, Tensor, bool], tuple[Tensor, Tensor | None, Tensor]]
"""g, u, whether slopes are wanted -> the value, its slope in g, its slope in u. Unwanted slopes may be wrong."""


def _swiglu(g: Tensor, u: Tensor, wants: bool) -> tuple[Tensor, Tensor | None, Tensor]:
    """The slope in g is u silu'(g) = u s + silu(g) u (1 - s), s = sigmoid(g): from the value to u, with weight s."""
    s = torch.sigmoid(g)
    silu = g * s
    if not wants:
        return silu.mul_(u), None, silu
    value = silu * u
    return value, torch.lerp(value, u, s, out=s), silu


def _geglu(g: Tensor, u: Tensor, wants: bool) -> tuple[Tensor, Tensor | None, Tensor]:
    """gelu(g) = g s, s = sigmoid(g (A + B g^2)); gelu'(g) = s + gelu(g) (1 - s) (A + 3 B g^2)."""
    square = g * g
    s = torch.sigmoid((GELU_A + GELU_B * square).mul_(g))
    gelu = g * s
    if not wants:
        return gelu.mul_(u), None, gelu
    slope = square.mul_(3.0 * GELU_B).add_(GELU_A).mul_(gelu).mul_(1.0 - s).add_(s)
    return gelu * u, slope.mul_(u), gelu


def _value(piece: Piece, h_2BTF: Tensor, out_slopes: Tensor | None) -> Tensor:
    """The value, computed in at least fp32. Its slopes in g and in u are written to `out_slopes`, which may be h.

    Both slopes are computed while g and u are in the caches. Three tensors [B, T, F] are saved for backward; torch's
    own operators would save four.
    """
    value_BTF = torch.empty_like(h_2BTF[0])
    work = torch.promote_types(h_2BTF.dtype, torch.float32)
    slopes = _pieces(h_2BTF if out_slopes is None else out_slopes)
    for part_2X, slopes_2X, value_1X in zip(_pieces(h_2BTF), slopes, _pieces(value_BTF[None]), strict=True):
        g, u = part_2X.to(work)
        value_1X[0], slope_in_g, slope_in_u = piece(g, u, out_slopes is not None)
        if slope_in_g is not None:
            slopes_2X[0], slopes_2X[1] = slope_in_g, slope_in_u
    return value_BTF


def _pieces(halves_2BTF: Tensor) -> tuple[Tensor, ...]:
    """Split all halves into pieces, at the same places: each piece is [number of halves, elements]."""
    flat_2X = halves_2BTF.view(len(halves_2BTF), halves_2BTF[0].numel())
    return torch.split(flat_2X, piece_size(flat_2X[0]), dim=1)


def _gated(plain: Callable[[Tensor], Tensor], piece: Piece) -> Activation:
    """plain(g) u of h = [g, u]."""

    def by_torch(h_2BTF: Tensor) -> Tensor:
        g_BTF, u_BTF = h_2BTF.unbind(0)  # by index, backward would write all of h for each half
        return plain(g_BTF) * u_BTF

    return Activation(
        plain=by_torch,
        value=lambda h_2BTF, out_slopes: _value(piece, h_2BTF, out_slopes),
        gradient=lambda slopes_2BTF, d_value_NF: slopes_2BTF * d_value_NF.view_as(slopes_2BTF[0]),
        keeps=lambda h_2BTF: is_kept(h_2BTF[0]),
    )


SWIGLU = _gated(F.silu, _swiglu)
"""silu(g) u of h = [g, u]."""
GEGLU = _gated(lambda g: F.gelu(g, approximate="tanh"), _geglu)
"""gelu(g) u of h = [g, u], in the tanh form of GELU (Gemma)."""
GATED = {"silu": SWIGLU, "gelu": GEGLU}
"""By the value of `model.activation`."""
