"""In: logits, or their softmax, log Z and cross-entropies. Out: the softmax in place; what an `Objective` makes of it.
Does not know targets or ranks: operators/head.py and strategies/vocabulary.py put these functions together."""

from __future__ import annotations

import torch
from torch import Tensor

from codescent.plan.objective import Objective

# Shapes: N tokens, V vocab_size, v columns of the logits on this rank, R tokens of a piece.
_PIECE_BYTES = 4 << 20  # fp32 softmax values computed at a time on a CPU: they fit in the caches
_PIECE_ELEMENTS = 1 << 19  # elements computed at a time in the wide dtype on a CPU: they fit in the caches


def softmax_in_pieces_(logits_NV: Tensor, work: torch.dtype, keep: bool) -> Tensor:
    """[2, N, 1]: the largest logit of each row, and its probability. If `keep`, the softmax overwrites the logits.

    Computed in the dtype `work`, on a CPU a few rows at a time.
    """
    num_rows, vocab = logits_NV.shape
    on_cpu = logits_NV.device.type == "cpu"
    num_piece_rows = min(num_rows, max(1, _PIECE_BYTES // (4 * vocab))) if on_cpu else num_rows
    narrow = logits_NV.dtype != work
    wide_RV = logits_NV.new_empty(num_piece_rows if narrow else 0, vocab, dtype=work)
    p_RV = logits_NV.new_empty(num_piece_rows, vocab, dtype=work)
    largest_2N1 = logits_NV.new_empty(2, num_rows, 1, dtype=work)
    for start in range(0, num_rows, num_piece_rows):
        rows = slice(start, start + num_piece_rows)
        piece_RV = logits_NV[rows]
        exact_RV = wide_RV[: len(piece_RV)].copy_(piece_RV) if narrow else piece_RV
        piece_p_RV = torch.softmax(exact_RV, -1, out=p_RV[: len(piece_RV)])
        torch.amax(exact_RV, -1, keepdim=True, out=largest_2N1[0, rows])
        torch.amax(piece_p_RV, -1, keepdim=True, out=largest_2N1[1, rows])
        if keep:
            piece_RV.copy_(piece_p_RV)
    return largest_2N1


def pieces(rows_NX: Tensor, columns: int) -> tuple[Tensor, ...]:
    """Parts of N rows to compute at a time, for logits of so many columns: a few on a CPU, else all."""
    on_cpu = rows_NX.device.type == "cpu"
    return torch.split(rows_NX, max(1, _PIECE_ELEMENTS // max(1, columns) if on_cpu else len(rows_NX)))


def sum_of_logits(logits_Nv: Tensor, work: torch.dtype) -> Tensor:
    """The sum [N, 1] of each row, in the dtype `work`."""
    parts = [torch.sum(piece_Rv, -1, keepdim=True, dtype=work) for piece_Rv in pieces(logits_Nv, logits_Nv.shape[1])]
    return torch.cat(parts)


def scale_(p_Nv: Tensor, factor_N1: Tensor, subtrahend: float = 0.0) -> None:
    """p = p * factor - subtrahend, a few rows at a time, because bf16 times a wide factor is wide. Rounded once."""
    columns = p_Nv.shape[1]
    for p_Rv, factor_R1 in zip(pieces(p_Nv, columns), pieces(factor_N1, columns), strict=True):
        if subtrahend:
            p_Rv.copy_((p_Rv * factor_R1).sub_(subtrahend))
        else:
            p_Rv *= factor_R1


def factor_of_softmax(log_z_N1: Tensor, objective: Objective) -> Tensor:
    """d(log Z + z_loss (log Z)^2) / d(log Z): with this factor the softmax is the gradient of both terms."""
    return 1.0 + 2.0 * objective.z_loss * log_z_N1


def gradient_at_targets(cross_entropies_N1: Tensor, log_z_N1: Tensor, objective: Objective, vocab_size: int) -> Tensor:
    """The gradient [N, 1] of the targets' logits.

    It is computed from the cross-entropy as p - 1 = expm1(-cross_entropy): exact even if p is nearly 1.
    """
    gradients_N1 = torch.expm1(-cross_entropies_N1)
    if objective.z_loss:
        # factor p - 1 = factor (p - 1) + (factor - 1)
        factor_N1 = factor_of_softmax(log_z_N1, objective)
        gradients_N1 = gradients_N1 * factor_N1 + (factor_N1 - 1.0)
    if objective.label_smoothing:
        gradients_N1 = gradients_N1 + objective.label_smoothing * (1.0 - 1.0 / vocab_size)
    return gradients_N1


def with_z_loss(losses_N1: Tensor, log_z_N1: Tensor, objective: Objective) -> Tensor:
    """The losses plus z_loss (log Z)^2."""
    return losses_N1 + objective.z_loss * log_z_N1.square() if objective.z_loss else losses_N1
