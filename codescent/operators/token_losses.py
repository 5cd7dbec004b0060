"""In: final activations, the vocabulary matrix, targets. Out: the cross-entropy of each token, with gradients.
Does not sum over tokens (preferences.py does). The logits of a chunk of tokens are in memory at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from codescent.operators import products
from codescent.operators.soft_cap import cap_
from codescent.operators.softmax import pieces

# Shapes: N tokens, D hidden_dim, V vocab_size (or the rows of the matrix on this rank), R tokens of a piece.

Statistics = Callable[[Tensor, Tensor, torch.dtype], tuple[Tensor, Tensor, Tensor]]
"""Logits [N, V], targets [N], wide dtype -> log Z, the target's logit, its column here (-1: elsewhere), each [N]."""


_SKIPPED = -2
"""The column of a target that is negative."""


def token_losses(
    x_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    chunk_tokens: int = 1024,
    tied_gradient_VD: Tensor | None = None,
    statistics: Statistics | None = None,
    *,
    cap: float = 0.0,
) -> Tensor:
    """The cross-entropy of each token, [N] in fp32 (in fp64 for x in fp64); 0 where the target is negative.

    Backward computes the logits again, chunk by chunk, because the gradient of a token may depend on the losses of all
    others: the product is computed twice. It sends nothing: forward keeps log Z.

    Args:
        x_ND, weight_VD: activations after the last norm; the vocabulary matrix, in the same dtype.
        targets_N: int64, each below V.
        chunk_tokens: rows of logits in memory at a time; 0: all.
        tied_gradient_VD: tensor that receives the weight's gradient, in its own dtype (see `head.tied_embedding`);
            None: the weight receives it.
        statistics: log Z over all ranks, if `weight_VD` has only this rank's rows; None: it has all rows.
        cap: the logits are capped (`soft_cap`); 0: they are not.
    """
    receiver_VD = weight_VD if tied_gradient_VD is None else tied_gradient_VD
    chunk = chunk_tokens or max(len(x_ND), 1)
    losses_N: Tensor = _TokenLosses.apply(  # type: ignore[no-untyped-call]
        x_ND, weight_VD.detach(), receiver_VD, targets_N, chunk, statistics or _statistics, cap
    )
    return losses_N


class _TokenLosses(torch.autograd.Function):
    """See `token_losses`."""

    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        weight_VD: Tensor,
        receiver_VD: Tensor,
        targets_N: Tensor,
        chunk: int,
        statistics: Statistics,
        cap: float,
    ) -> Tensor:
        work = torch.promote_types(x_ND.dtype, torch.float32)
        log_z_N, losses_N = x_ND.new_empty(2, len(x_ND), dtype=work).unbind()
        columns_N = torch.empty_like(targets_N)
        for start in range(0, len(x_ND), chunk):
            rows = slice(start, start + chunk)
            logits_NV = products.mm(x_ND[rows], weight_VD.t())
            if cap:
                cap_(logits_NV, cap)
            wanted_N = targets_N[rows]
            log_z_N[rows], at_target_N, columns_N[rows] = statistics(logits_NV, wanted_N.clamp(min=0), work)
            losses_N[rows] = (log_z_N[rows] - at_target_N).masked_fill(wanted_N < 0, 0.0)
        columns_N.masked_fill_(targets_N < 0, _SKIPPED)
        ctx.save_for_backward(x_ND, weight_VD, columns_N, log_z_N, losses_N)
        ctx.chunk, ctx.cap, ctx.gradient_dtype = chunk, cap, receiver_VD.dtype
        return losses_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_losses_N: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, weight_VD, columns_N, log_z_N, losses_N = ctx.saved_tensors
        wants_x, _, wants_weight, *_ = ctx.needs_input_grad
        work, chunk = log_z_N.dtype, ctx.chunk
        d_losses_N = d_losses_N.masked_fill(columns_N == _SKIPPED, 0.0)
        d_x_ND = torch.empty_like(x_ND) if wants_x else None
        d_weight_VD: Tensor | None = None
        for start in range(0, len(x_ND), chunk):
            rows = slice(start, start + chunk)
            logits_NV = products.mm(x_ND[rows], weight_VD.t())
            slope_NV = cap_(logits_NV, ctx.cap) if ctx.cap else None
            _to_gradient_(logits_NV, columns_N[rows], log_z_N[rows], losses_N[rows], d_losses_N[rows])
            if slope_NV is not None:
                logits_NV.mul_(slope_NV)
            if d_x_ND is not None:
                products.mm(logits_NV, weight_VD, out=d_x_ND[rows])
            if wants_weight and len(x_ND) <= chunk:
                d_weight_VD = products.mm(logits_NV.t(), x_ND)
            elif wants_weight:
                d_weight_VD = products.add_product(d_weight_VD, logits_NV.t(), x_ND[rows], work)
        if wants_weight:
            d_weight_VD = torch.zeros_like(weight_VD) if d_weight_VD is None else d_weight_VD  # None: no tokens
            d_weight_VD = d_weight_VD.to(ctx.gradient_dtype)
        return d_x_ND, None, d_weight_VD, None, None, None, None


def _to_gradient_(logits_NV: Tensor, columns_N: Tensor, log_z_N: Tensor, losses_N: Tensor, d_losses_N: Tensor) -> None:
    """Overwrite logits by the gradient (softmax - onehot) d_loss, a few rows at a time, rounded once.

    At the target it is expm1(-loss) d_loss: exact even if the probability is nearly 1.
    """
    columns = logits_NV.shape[1]
    for logits_RV, log_z_R1, d_R1 in zip(
        pieces(logits_NV, columns), pieces(log_z_N[:, None], columns), pieces(d_losses_N[:, None], columns), strict=True
    ):
        logits_RV.copy_((logits_RV.to(log_z_R1.dtype) - log_z_R1).exp_().mul_(d_R1))
    if columns:
        here_N = columns_N >= 0
        rows_N, at_N = torch.arange(len(columns_N), device=columns_N.device), columns_N.clamp(min=0)
        at_target_N = (torch.expm1(-losses_N) * d_losses_N).to(logits_NV.dtype)
        logits_NV[rows_N, at_N] = torch.where(here_N, at_target_N, logits_NV[rows_N, at_N])


def log_sums(logits_NV: Tensor, work: torch.dtype) -> Tensor:
    """log(sum(exp)) of each row, [N] in the dtype `work`; -inf without columns. A few rows at a time on a CPU."""
    if not logits_NV.shape[1]:
        return logits_NV.new_full((len(logits_NV),), -torch.inf, dtype=work)
    parts = [torch.logsumexp(piece_RV.to(work), -1) for piece_RV in pieces(logits_NV, logits_NV.shape[1])]
    return torch.cat(parts)


def _statistics(logits_NV: Tensor, targets_N: Tensor, work: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """See `Statistics`: of a rank that has all columns."""
    at_target_N = logits_NV.gather(1, targets_N[:, None]).squeeze(1).to(work)
    return log_sums(logits_NV, work), at_target_N, targets_N
