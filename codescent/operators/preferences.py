"""In: sums of the log-probabilities of answers, those of a reference. Out: DPO, IPO, KTO, ORPO or SimPO; their rewards.
Does not compute log-probabilities (token_losses.py does) and does not know which tokens are an answer (tasks do)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from codescent.base.device import wide_dtype
from codescent.plan.objective import CHOSEN, PROMPT, REJECTED, Preference

# Shapes: B samples, T positions, K sums of a sample (`Preference.sums`), A answers of a sample with KTO, Q measures.


ROUNDING = 1e-6
"""A gain that is smaller than this share of the log-probabilities is rounding: before the first step all are."""


class ComparedAnswers(NamedTuple):
    """Which answers samples have, and what is known of them.

    Attributes:
        spans_BT: int64: to which of the K sums the target at each position belongs; negative: to none.
        references_BK: the sums of the reference, in fp64; None: they are not known yet, or the loss needs none.
        wanted_BA: int64, KTO: 1 if an answer is wanted; None: samples are pairs.
    """

    spans_BT: Tensor
    references_BK: Tensor | None = None
    wanted_BA: Tensor | None = None


class WholeSamples:
    """A rank that has all positions of its samples. A strategy that divides samples replaces this object.

    `ranks`: the ranks that share a sample.
    """

    ranks = 1

    def total(self, sums_BK: Tensor) -> Tensor:
        """The sums over all positions, given those over the positions of this rank."""
        return sums_BK


def compared(
    losses_BT: Tensor,
    spans_BT: Tensor,
    answers: ComparedAnswers,
    preference: Preference,
    whole: WholeSamples,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The summed loss of the preferences, and the sums of its measures (see `preference_loss`), both divided by the
    ranks that share a sample.

    The gradients are those of scale * loss. Forward computes them: one number for each token.

    Args:
        losses_BT: cross-entropies at the positions of this rank; the gradient is theirs.
        spans_BT: the spans of these positions.
        answers: of whole samples.
        whole: adds what other ranks have of the same samples.
    """
    found: tuple[Tensor, Tensor] = _Compared.apply(losses_BT, spans_BT, answers, preference, whole, scale)  # type: ignore[no-untyped-call]
    return found


class _Compared(torch.autograd.Function):
    """See `compared`."""

    @staticmethod
    def forward(
        ctx: Any,
        losses_BT: Tensor,
        spans_BT: Tensor,
        answers: ComparedAnswers,
        preference: Preference,
        whole: WholeSamples,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        sums_BK = whole.total(sums_of(losses_BT, spans_BT, preference.sums))
        # Hooks around this pass, such as those that move or count what it keeps, need not see what is gone after this.
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is):
            sums_BK = sums_BK.detach().requires_grad_()
            loss, measured = preference_loss(sums_BK, answers, preference)
            (d_sums_BK,) = torch.autograd.grad(loss, sums_BK)
        d_losses_BT = -d_sums_BK.gather(1, spans_BT.clamp(min=0)).masked_fill_(spans_BT < 0, 0.0)
        ctx.save_for_backward((scale * d_losses_BT).to(losses_BT.dtype))
        ctx.mark_non_differentiable(measured)
        return loss.detach() / whole.ranks, measured / whole.ranks

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        (d_losses_BT,) = ctx.saved_tensors
        return d_losses_BT * d_loss.to(d_losses_BT.dtype), None, None, None, None, None


def _as_it_is(kept: Tensor) -> Tensor:
    return kept


def sums_of(losses_BT: Tensor, spans_BT: Tensor, number: int) -> Tensor:
    """The log-probability of each of K spans, [B, K], given the cross-entropies and the spans of some positions.

    In fp64, where the device has it. Each sum has one order, on every device.
    """
    dtype = wide_dtype(losses_BT.device)
    return torch.stack([-losses_BT.masked_fill(spans_BT != span, 0.0).to(dtype).sum(1) for span in range(number)], 1)


def preference_loss(sums_BK: Tensor, answers: ComparedAnswers, preference: Preference) -> tuple[Tensor, Tensor]:
    """The summed loss of the samples, and the sums of its measures: [Q, 2], each with the number of its terms.

    Let l be the log-probability of an answer, l_ref that of the reference, n the tokens of the answer, c and r the
    chosen and the rejected answer, and s the logistic function.

        dpo    -log s(beta ((l_c - l_ref_c) - (l_r - l_ref_r)))               Rafailov et al. 2023, equation 7
        ipo    ((l_c - l_ref_c) / n_c - (l_r - l_ref_r) / n_r - 1 / (2 beta))^2     Azar et al. 2023, equation 17
        simpo  -log s(beta (l_c / n_c - l_r / n_r) - margin)                  Meng et al. 2024, equation 6
        orpo   -l / n of prompt and chosen answer - beta log s(log odds_c - log odds_r),
               with odds p / (1 - p) of p = exp(l / n)                        Hong et al. 2024, equations 6 and 7
        kto    weight (1 - s(beta (l - l_ref - z))) of an answer that is wanted,
               weight (1 - s(beta (z - l + l_ref))) of another one            Ethayarajh et al. 2024, equation 8
               z = max(0, mean of l - l_ref over the sample's prompts, each with the answer of another one); no gradient

    Rewards are beta (l - l_ref), without a reference beta l / n. IPO divides by the tokens as its authors do, and
    `trl`. Measures of pairs: rewards of both answers, their difference, the share of pairs with a positive one. Of KTO:
    mean rewards of both kinds of answers, the share of answers on the right side of z, and z itself.
    """
    counts_BK = torch.stack([(answers.spans_BT == span).sum(1) for span in range(preference.sums)], 1)
    gains_BK = sums_BK
    if preference.referenced:
        assert answers.references_BK is not None, "the log-probabilities of the reference are not known"
        gains_BK = sums_BK - answers.references_BK.to(sums_BK.dtype)
    if preference.answers:
        assert answers.wanted_BA is not None, "KTO needs to know which answers are wanted"
        return _kto(gains_BK, sums_BK[:, : preference.answers], answers.wanted_BA == 1, preference)
    means_BK = gains_BK / counts_BK.clamp(min=1)
    beta, kind = preference.beta, preference.kind
    rewarded_BK = gains_BK if preference.referenced else means_BK
    chosen_B, rejected_B = rewarded_BK[:, CHOSEN], rewarded_BK[:, REJECTED]
    gap_B = chosen_B - rejected_B
    if kind == "dpo":
        losses_B = -F.logsigmoid(beta * gap_B)
    elif kind == "ipo":
        losses_B = (means_BK[:, CHOSEN] - means_BK[:, REJECTED] - 1.0 / (2.0 * beta)).square()
    elif kind == "simpo":
        losses_B = -F.logsigmoid(beta * gap_B - preference.margin)
    else:
        assert kind == "orpo"
        odds_B = gap_B - (_log_complement(chosen_B) - _log_complement(rejected_B))
        length_B = (counts_BK[:, CHOSEN] + counts_BK[:, PROMPT]).clamp(min=1)
        losses_B = -(sums_BK[:, CHOSEN] + sums_BK[:, PROMPT]) / length_B - beta * F.logsigmoid(odds_B)
    size_B = sums_BK.detach()[:, [CHOSEN, REJECTED]].abs().sum(1)
    right_B = gap_B.detach() > ROUNDING * (size_B if preference.referenced else torch.zeros_like(size_B))
    rewards = chosen_B, rejected_B, gap_B
    found = [*(beta * one_B.detach().sum() for one_B in rewards), right_B.sum().to(gap_B.dtype)]
    return losses_B.sum(), torch.stack([torch.stack([one, one.new_tensor(len(gap_B))]) for one in found])


def _kto(gains_BK: Tensor, sums_BA: Tensor, wanted_BA: Tensor, preference: Preference) -> tuple[Tensor, Tensor]:
    """See `preference_loss`. The first half of the sums are of answers, the second of answers to other prompts."""
    gains_BA, others_BA = gains_BK.chunk(2, dim=1)
    z_B1 = others_BA.detach().mean(1, keepdim=True).clamp(min=0.0)
    distance_BA = torch.where(wanted_BA, gains_BA - z_B1, z_B1 - gains_BA)
    losses_BA = 1.0 - torch.sigmoid(preference.beta * distance_BA)
    weights_BA = torch.where(wanted_BA, preference.chosen_weight, preference.rejected_weight).to(losses_BA.dtype)
    right_BA = distance_BA.detach() > ROUNDING * sums_BA.detach().abs()
    rewards_BA, kind = preference.beta * gains_BA.detach(), losses_BA.dtype
    terms = (
        (rewards_BA * wanted_BA, wanted_BA),
        (rewards_BA * ~wanted_BA, ~wanted_BA),
        (right_BA, torch.ones_like(wanted_BA)),
        (z_B1, torch.ones_like(z_B1)),
    )
    found = [torch.stack([total.to(kind).sum(), count.to(kind).sum()]) for total, count in terms]
    return (weights_BA * losses_BA).sum(), torch.stack(found)


def _log_complement(logs_B: Tensor) -> Tensor:
    """log(1 - exp(x)) for x < 0, exact near 0 and for large negative x (Mächler 2012, "Accurately computing
    log(1 - exp(-|a|))", equation 7). Where exp(x) is 1, x counts as the largest number below 0."""
    logs_B = logs_B.clamp(max=-torch.finfo(logs_B.dtype).eps)
    small_B = logs_B > -0.6931471805599453
    near_B = torch.log(-torch.expm1(torch.where(small_B, logs_B, -1.0)))
    far_B = torch.log1p(-torch.exp(torch.where(small_B, -1.0, logs_B)))
    return torch.where(small_B, near_B, far_B)
