"""In: logits, targets. Out: the losses; their gradient overwrites the logits. One kernel of torch.compile, for devices
other than a CPU: it reads the logits twice and writes them once, without a copy in fp32.
Does not decide whether it is compiled: compiled.py does."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from codescent.operators import compiled
from codescent.operators.softmax import factor_of_softmax, gradient_at_targets, with_z_loss
from codescent.plan.objective import Objective

# Shapes: N tokens, V vocab_size, v columns of the logits on this rank.


def serves(x: Tensor) -> bool:
    """Whether logits on the device of x are given to the functions of this file."""
    return compiled.fuses(x.device)


class Statistics(NamedTuple):
    """Of the columns that a rank holds, each [N, 1] in the wide dtype.

    Attributes:
        largest: the largest logit z.
        sums: the sum of exp(z - largest).
        at_target: the target's logit; 0: another rank has it.
        total: the sum of the logits, if it is asked for.
    """

    largest: Tensor
    sums: Tensor
    at_target: Tensor
    total: Tensor


def statistics(logits_Nv: Tensor, at_N: Tensor, work: torch.dtype, *, total: bool) -> Statistics:
    """See `Statistics`. `at_N`: column of each target; outside of [0, v): another rank has it."""
    return Statistics(*compiled.alone(_statistics)(logits_Nv, at_N, work, total))


def overwrite_(
    logits_Nv: Tensor,
    at_N: Tensor,
    largest_N1: Tensor,
    log_sum_N1: Tensor,
    entropies_N1: Tensor,
    objective: Objective,
    vocab: int,
) -> None:
    """Overwrite the logits by the gradient of the objective. `largest` and `log_sum` are those of all columns."""
    compiled.alone(_overwrite_)(logits_Nv, at_N, largest_N1, log_sum_N1, entropies_N1, objective, vocab, None)


def softmax_gradient_(
    logits_NV: Tensor, targets_N: Tensor, work: torch.dtype, wants_gradient: bool, objective: Objective
) -> Tensor:
    """The losses [N, 1] (see `operators.head.SoftmaxGradient`). A negative target has no loss and no gradient."""
    losses_N1: Tensor = compiled.alone(whole_)(logits_NV, targets_N, work, wants_gradient, objective)
    return losses_N1


def whole_(
    logits_NV: Tensor, targets_N: Tensor, work: torch.dtype, wants_gradient: bool, objective: Objective
) -> Tensor:
    """What `softmax_gradient_` compiles: an online softmax (Milakov and Gimelshein 2018) where the compiler fuses."""
    smoothing, vocab = objective.label_smoothing, logits_NV.shape[1]
    largest_N1, sums_N1, at_target_N1, total_N1 = _statistics(logits_NV, targets_N, work, smoothing > 0.0)
    log_sum_N1 = sums_N1.log()
    entropies_N1 = log_sum_N1 - (at_target_N1 - largest_N1)
    skipped_N1 = (targets_N < 0)[:, None]
    if wants_gradient:
        _overwrite_(logits_NV, targets_N, largest_N1, log_sum_N1, entropies_N1, objective, vocab, skipped_N1)
    smoothed_N1 = entropies_N1 + smoothing * (at_target_N1 - total_N1 / vocab) if smoothing else entropies_N1
    losses_N1 = with_z_loss(smoothed_N1, log_sum_N1 + largest_N1, objective)
    losses_N1 = torch.where((targets_N >= vocab)[:, None], torch.nan, losses_N1)  # a token outside the vocabulary
    return torch.where(skipped_N1, 0.0, losses_N1)


def _statistics(
    logits_Nv: Tensor, at_N: Tensor, work: torch.dtype, total: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    z_Nv = logits_Nv.to(work)
    largest_N1 = z_Nv.amax(-1, keepdim=True)
    sums_N1 = (z_Nv - largest_N1).exp().sum(-1, keepdim=True)
    at_target_N1 = torch.where(_is_target(logits_Nv, at_N), z_Nv, 0.0).sum(-1, keepdim=True)
    return largest_N1, sums_N1, at_target_N1, z_Nv.sum(-1, keepdim=True) if total else at_target_N1


def _is_target(logits_Nv: Tensor, at_N: Tensor) -> Tensor:
    """bool [N, v]. A comparison instead of an index: an indexed write would be a kernel of its own."""
    return torch.arange(logits_Nv.shape[1], device=logits_Nv.device) == at_N[:, None]


def _overwrite_(
    logits_Nv: Tensor,
    at_N: Tensor,
    largest_N1: Tensor,
    log_sum_N1: Tensor,
    entropies_N1: Tensor,
    objective: Objective,
    vocab: int,
    skipped_N1: Tensor | None,
) -> None:
    log_z_N1 = log_sum_N1 + largest_N1
    p_Nv = (logits_Nv.to(largest_N1.dtype) - largest_N1 - log_sum_N1).exp()
    gradient_Nv = p_Nv * factor_of_softmax(log_z_N1, objective) - objective.label_smoothing / vocab
    at_target_N1 = gradient_at_targets(entropies_N1, log_z_N1, objective, vocab)
    gradient_Nv = torch.where(_is_target(logits_Nv, at_N), at_target_N1, gradient_Nv)
    if skipped_N1 is not None:
        gradient_Nv = torch.where(skipped_N1, 0.0, gradient_Nv)
    logits_Nv.copy_(gradient_Nv)
