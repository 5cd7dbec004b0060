"""In: losses of the tokens of answers that a model has written, rewards. Out: the loss of GRPO, with what it measures.
Does not write answers (train/rollouts.py does) and does not know which tokens are an answer (tasks do)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from codescent.base.device import wide_dtype
from codescent.plan.objective import Policy

# Shapes: B samples, each a prompt with G answers; T positions; Q measures.

SMALLEST_SPREAD = 1e-4
"""Added to the standard deviation of a group before it divides, as `trl` does."""


class WrittenAnswers(NamedTuple):
    """Answers that the model has written to the prompt of each sample, and what is known of them.

    Attributes:
        spans_BT: int64: the answer, in [0, G), to which the target of each position belongs; negative: to none.
        rewards_BG: of each answer, fp64; None: only the losses of the tokens are wanted.
        cut_BG: int64: 1 if the answer ended at its limit.
        old_BT: log-probabilities of the tokens by the weights that wrote them; None: by the present weights.
        reference_BT: log-probabilities by the initial weights; None: the objective has no KL term.
    """

    spans_BT: Tensor
    rewards_BG: Tensor | None = None
    cut_BG: Tensor | None = None
    old_BT: Tensor | None = None
    reference_BT: Tensor | None = None


def advantages(rewards_BG: Tensor, *, scaled: bool) -> Tensor:
    """Rewards minus the mean of their group, `scaled`: divided by its standard deviation (of G - 1 degrees of freedom).

    Shao et al. 2024, "DeepSeekMath", section 4.1.2; without the division Liu et al. 2025, "Dr. GRPO".
    """
    gains_BG = rewards_BG - rewards_BG.mean(1, keepdim=True)
    return gains_BG / (rewards_BG.std(1, keepdim=True) + SMALLEST_SPREAD) if scaled else gains_BG


def policy_loss(losses_BT: Tensor, answers: WrittenAnswers, policy: Policy, scale: float) -> tuple[Tensor, Tensor]:
    """The summed loss of the answers, and the sums of its measures: [Q, 2], each with the number of its terms.

    Let l be the log-probability of a token, l_old that by the weights that wrote it, l_ref that of the reference, A the
    advantage of its answer, and r = exp(l - l_old). The loss of a token is (Shao et al. 2024, equation 3; with an upper
    limit of its own Yu et al. 2025, "DAPO", equation 8)

        -min(r A, clamp(r, 1 - clip, 1 + clip_high) A) + kl (exp(l_ref - l) - (l_ref - l) - 1)

    The last factor estimates the KL divergence (Schulman 2020, "Approximating KL divergence", k3). With
    `policy.kl_corrected` r multiplies it, and its gradient is that of the divergence (DeepSeek-AI 2025,
    "DeepSeek-V3.2", section 3.1). An answer counts by
    the mean of its tokens; with `policy.mean` "limit" by their sum divided by `policy.new_tokens` (Liu et al. 2025).

    The gradients are those of scale * loss. Forward computes them: one number for each token.

    Args:
        losses_BT: cross-entropies of the tokens; the gradient is theirs.
        answers: with rewards.
    """
    found: tuple[Tensor, Tensor] = _PolicyLoss.apply(losses_BT, answers, policy, scale)  # type: ignore[no-untyped-call]
    return found


class _PolicyLoss(torch.autograd.Function):
    """See `policy_loss`."""

    @staticmethod
    def forward(
        ctx: Any, losses_BT: Tensor, answers: WrittenAnswers, policy: Policy, scale: float
    ) -> tuple[Tensor, Tensor]:
        loss, measured, d_logs_BT = _loss_and_gradient(-losses_BT.to(wide_dtype(losses_BT.device)), answers, policy)
        ctx.save_for_backward((-scale * d_logs_BT).to(losses_BT.dtype))
        ctx.mark_non_differentiable(measured)
        return loss, measured

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        (d_losses_BT,) = ctx.saved_tensors
        return d_losses_BT * d_loss.to(d_losses_BT.dtype), None, None, None


def _loss_and_gradient(logs_BT: Tensor, answers: WrittenAnswers, policy: Policy) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, its measures, and its gradient by the log-probabilities."""
    assert answers.rewards_BG is not None
    assert answers.cut_BG is not None
    spans_BT, rewards_BG = answers.spans_BT, answers.rewards_BG.to(logs_BT.dtype)
    counts_BG = torch.stack([(spans_BT == one).sum(1) for one in range(policy.group)], 1)
    of_answer_BG = counts_BG.clamp(min=1) if policy.mean == "answer" else torch.full_like(counts_BG, policy.new_tokens)
    is_token_BT, at_BT = spans_BT >= 0, spans_BT.clamp(min=0)
    share_BT = of_answer_BG.gather(1, at_BT).to(logs_BT.dtype).reciprocal().masked_fill(~is_token_BT, 0.0)
    gain_BT = advantages(rewards_BG, scaled=policy.scaled).gather(1, at_BT)

    old_BT = logs_BT if answers.old_BT is None else answers.old_BT.to(logs_BT.dtype)
    ratio_BT = (logs_BT - old_BT).masked_fill(~is_token_BT, 0.0).exp()
    whole_BT, cut_BT = ratio_BT * gain_BT, ratio_BT.clamp(1.0 - policy.clip, 1.0 + policy.clip_high) * gain_BT
    is_cut_BT = cut_BT < whole_BT  # then the loss does not depend on the weights
    losses_BT, d_logs_BT = -torch.minimum(whole_BT, cut_BT), whole_BT.neg().masked_fill(is_cut_BT, 0.0)
    terms: list[tuple[Tensor | int, Tensor | int]] = [
        (rewards_BG.sum(), rewards_BG.numel()),
        (rewards_BG.std(1).sum(), len(rewards_BG)),
        (counts_BG.sum(), rewards_BG.numel()),
        (answers.cut_BG.sum(), rewards_BG.numel()),
        ((rewards_BG == rewards_BG[:, :1]).all(1).sum(), len(rewards_BG)),
    ]
    tokens = is_token_BT.sum()
    if policy.kl:
        assert answers.reference_BT is not None, "the log-probabilities of the reference are not known"
        over_BT = (answers.reference_BT.to(logs_BT.dtype) - logs_BT).masked_fill(~is_token_BT, 0.0)
        divergence_BT = torch.expm1(over_BT) - over_BT
        term_BT, d_term_BT = divergence_BT, -torch.expm1(over_BT)
        if policy.kl_corrected:
            term_BT, d_term_BT = ratio_BT * divergence_BT, ratio_BT * (divergence_BT + d_term_BT)
        losses_BT, d_logs_BT = losses_BT + policy.kl * term_BT, d_logs_BT + policy.kl * d_term_BT
        terms.append((divergence_BT.sum(), tokens))
    if policy.updates > 1:
        terms.append(((is_cut_BT & is_token_BT).sum(), tokens))
    like: Any = {"dtype": logs_BT.dtype, "device": logs_BT.device}
    measured = torch.stack([torch.stack([torch.as_tensor(one, **like) for one in pair]) for pair in terms])
    return (losses_BT * share_BT).sum(), measured, d_logs_BT * share_BT
