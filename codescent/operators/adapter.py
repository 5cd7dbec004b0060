"""In: inputs of a matrix that is not trained, and the two matrices beside it that are. Out: what they add; gradients.
Does not own a parameter (linear does): functions that write their own backward pass share these lines."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor

# Shapes: N inputs, I their width, O outputs, R the adapter's rank.


class Adapter(NamedTuple):
    """scale B A beside a matrix W (Hu et al. 2021, "LoRA", equation 3); all None where there is none.

    A layer of several matrices in one weight [O, 2, I] has B [O, 2, R].
    """

    a_RI: Tensor | None = None
    b_OR: Tensor | None = None
    scale: float = 0.0


NONE = Adapter()


def flat(x_BTI: Any) -> Any:
    """[N, I]; None where there is none: of what a backward pass was not to read, nothing is kept. (Typed as autograd
    types what it has kept.)"""
    return None if x_BTI is None else x_BTI.flatten(0, -2)


def product(x_BTI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, adapter: Adapter) -> Tensor:
    """x W^T + b + scale (x A^T) B^T: [B, T, O]. Its gradients are autograd's."""
    if adapter.a_RI is None or adapter.b_OR is None:
        return F.linear(x_BTI, weight_OI, bias_O)
    x_NI = x_BTI.flatten(0, -2)
    y_NO = F.linear(x_NI, weight_OI, bias_O)
    # In the memory of y, which nobody else has: two passes over it less.
    y_NO = y_NO.addmm_(F.linear(x_NI, adapter.a_RI), adapter.b_OR.t(), alpha=adapter.scale)
    return y_NO.view(*x_BTI.shape[:-1], -1)


def add_(y_NO: Tensor, x_NI: Tensor, adapter: Adapter) -> Tensor | None:
    """Adds what the adapter makes of x to y, in place. Returns x A^T [N, R], which the backward pass reads."""
    if adapter.a_RI is None or adapter.b_OR is None:
        return None
    u_NR = F.linear(x_NI, adapter.a_RI)
    y_NO.addmm_(u_NR, adapter.b_OR.t(), alpha=adapter.scale)
    return u_NR


def backward_(
    d_y_NO: Tensor, x_NI: Tensor, u_NR: Tensor | None, adapter: Adapter, d_x_NI: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of A and B; adds the adapter's share of that of x to `d_x_NI`, in place."""
    if adapter.a_RI is None or adapter.b_OR is None or u_NR is None:
        return None, None
    d_u_NR = (d_y_NO @ adapter.b_OR).mul_(adapter.scale)
    d_x_NI.addmm_(d_u_NR, adapter.a_RI)
    return d_u_NR.t() @ x_NI, (d_y_NO.t() @ u_NR).mul_(adapter.scale)
