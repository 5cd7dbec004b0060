"""In: gates g and values u of a feed-forward. Out: SwiGLU and GEGLU with hand-written gradients, as `Activation`s.
Does not multiply by matrices (activations.py does, before and after)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from codescent.operators.activations import GELU_A, GELU_B, Activation, piece_size
from codescent.operators.linear import is_kept

# Shapes: B batch, T positions, N = B * T tokens, F ffn_dim, X elements of a piece; 2: the gate g, and the values u.
# swiglu(g, u) = silu(g) u,  silu(g) = g sigmoid(g)  (Shazeer 2020, "GLU Variants Improve Transformer", equation 6)
# geglu(g, u) = gelu(g) u  (the same equation), with gelu in its tanh form, as in activations.py

Piece = Callable[[Tensor, Tensor, Tensor, Tensor | None], None]
"""g, u, memory for the value, memory for the slopes in g and in u or None. The memory of the slopes may be that of g
and u: it is written when these have been read. It may have another dtype."""


def _swiglu(g: Tensor, u: Tensor, value: Tensor, slopes: Tensor | None) -> None:
    """The slope in g is u silu'(g) = u s + silu(g) u (1 - s), s = sigmoid(g): from the value to u, with weight s."""
    s = torch.sigmoid(g)
    silu = g * s
    torch.mul(silu, u, out=value)
    if slopes is not None:
        _put(slopes[0], partial(torch.lerp, value, u, s), s)
        slopes[1] = silu


def _geglu(g: Tensor, u: Tensor, value: Tensor, slopes: Tensor | None) -> None:
    """gelu(g) = g s, s = sigmoid(g (A + B g^2)); gelu'(g) = s + gelu(g) (1 - s) (A + 3 B g^2)."""
    square = g * g
    s = torch.sigmoid((GELU_A + GELU_B * square).mul_(g))
    gelu = g * s
    torch.mul(gelu, u, out=value)
    if slopes is not None:
        slope = square.mul_(3.0 * GELU_B).add_(GELU_A).mul_(gelu).mul_(1.0 - s).add_(s)
        _put(slopes[0], partial(torch.mul, slope, u), slope)
        slopes[1] = gelu


def _put(memory: Tensor, make: Callable[..., Tensor], spare: Tensor) -> None:
    """Compute into `memory`; if its dtype is another one, in `spare` memory first."""
    if memory.dtype == spare.dtype:
        make(out=memory)
    else:
        memory.copy_(make(out=spare))


def _value(piece: Piece, h_2BTF: Tensor, out_slopes: Tensor | None) -> Tensor:
    """The value, computed in at least fp32. Its slopes in g and in u are written to `out_slopes`, which may be h.

    Both slopes are computed while g and u are in the caches. Three tensors [B, T, F] are saved for backward; torch's
    own operators would save four.
    """
    value_BTF = torch.empty_like(h_2BTF[0])
    work = torch.promote_types(h_2BTF.dtype, torch.float32)
    slopes = _pieces(h_2BTF if out_slopes is None else out_slopes)
    for part_2X, slopes_2X, value_1X in zip(_pieces(h_2BTF), slopes, _pieces(value_BTF[None]), strict=True):
        if h_2BTF.dtype == work:
            piece(part_2X[0], part_2X[1], value_1X[0], None if out_slopes is None else slopes_2X)
            continue
        wide_2X, wide_X = part_2X.to(work), torch.empty(part_2X.shape[1], dtype=work, device=part_2X.device)
        piece(wide_2X[0], wide_2X[1], wide_X, None if out_slopes is None else slopes_2X)
        value_1X[0] = wide_X
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
        gradient=lambda slopes_2BTF, d_value_NF: slopes_2BTF.mul_(d_value_NF.view_as(slopes_2BTF[0])),
        keeps=lambda h_2BTF: is_kept(h_2BTF[0]),
    )


SWIGLU = _gated(F.silu, _swiglu)
"""silu(g) u of h = [g, u]."""
GEGLU = _gated(lambda g: F.gelu(g, approximate="tanh"), _geglu)
"""gelu(g) u of h = [g, u], in the tanh form of GELU (Gemma)."""
GATED = {"silu": SWIGLU, "gelu": GEGLU}
"""By the value of `model.activation`."""
