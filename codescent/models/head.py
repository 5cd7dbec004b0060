"""In: final activations, the vocabulary matrix, target tokens. Out: the sum of the cross-entropies, and its gradients.
Does not keep logits: a chunk of rows at a time becomes logits, then their gradient in the same memory, then is gone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Shapes: N tokens, D hidden_dim, V vocab_size.
_PIECE_BYTES = 4 << 20  # of fp32 softmax work at a time on a CPU: it stays in the caches


def head_loss(
    x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, chunk_tokens: int = 1024, loss_scale: float = 1.0
) -> Tensor:
    """SUM over tokens of the cross-entropy of softmax(x @ weight.T) against the targets: a scalar, fp32 (fp64 in fp64).

    Gradients are those of loss_scale * (what is returned): they are made in the forward pass and scaled there for
    nothing, where a division of the loss would cost a pass over all of them.

    Args:
        x_ND: activations after the last norm.
        weight_VD: the vocabulary matrix, in the dtype of x.
        targets_N: int64, each in [0, V).
        chunk_tokens: rows of logits that exist at a time; 0: all.
        loss_scale: factor on the gradients, not on the value.
    """
    loss: Tensor = HeadLoss.apply(x_ND, weight_VD, targets_N, chunk_tokens or len(x_ND), loss_scale)  # type: ignore[no-untyped-call]
    return loss


class HeadLoss(torch.autograd.Function):
    """Loss and gradients in one pass over the logits."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, chunk: int, scale: float) -> Tensor:
        """See `head_loss`."""
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        work = torch.promote_types(x_ND.dtype, torch.float32)
        loss = torch.zeros((), dtype=work, device=x_ND.device)
        d_x_ND = torch.empty_like(x_ND) if wants_x else None
        one_chunk = len(x_ND) <= chunk
        d_weight_VD: Tensor | None = None
        for start in range(0, len(x_ND), chunk):
            rows = slice(start, start + chunk)
            logits_NV = x_ND[rows] @ weight_VD.t()
            loss += _softmax_gradient_(logits_NV, targets_N[rows], work, wants_x or wants_weight)
            if d_x_ND is not None:
                torch.mm(logits_NV, weight_VD, out=d_x_ND[rows])
            if wants_weight:
                d_chunk = logits_NV.t() @ (x_ND[rows] * scale)
                if one_chunk:
                    d_weight_VD = d_chunk
                elif d_weight_VD is None:
                    d_weight_VD = d_chunk.to(work)
                else:
                    d_weight_VD += d_chunk
        if d_weight_VD is not None:
            d_weight_VD = d_weight_VD.to(weight_VD.dtype)
        if d_x_ND is not None:
            d_x_ND *= scale
        ctx.save_for_backward(d_x_ND, d_weight_VD)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        """The gradients that forward made."""
        d_x_ND, d_weight_VD = ctx.saved_tensors
        if d_loss.device.type != "cpu" or float(d_loss) != 1.0:
            d_x_ND = d_x_ND * d_loss if d_x_ND is not None else None
            d_weight_VD = d_weight_VD * d_loss if d_weight_VD is not None else None
        return d_x_ND, d_weight_VD, None, None, None


def _softmax_gradient_(logits_NV: Tensor, targets_N: Tensor, work: torch.dtype, wants_gradient: bool) -> Tensor:
    """Sum of the cross-entropies; the logits become softmax - onehot, their gradient, in place."""
    rows_a_piece = max(1, _PIECE_BYTES // (4 * logits_NV.shape[1]))
    loss = torch.zeros((), dtype=work, device=logits_NV.device)
    for start in range(0, len(logits_NV), rows_a_piece):
        piece_NV = logits_NV[start : start + rows_a_piece]
        targets_N1 = targets_N[start : start + rows_a_piece, None]
        log_p_NV = torch.log_softmax(piece_NV, -1, dtype=work)
        loss -= log_p_NV.gather(1, targets_N1).sum()
        if wants_gradient:
            p_NV = log_p_NV.exp_()
            p_NV.scatter_add_(1, targets_N1, torch.full_like(targets_N1, -1, dtype=work))
            piece_NV.copy_(p_NV)
    return loss
