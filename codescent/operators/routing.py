"""In: the scores of a router for each token. Out: the experts of each token with their weights; where each of its rows
lies among the rows of the experts; the auxiliary losses of a router, and their gradients.
Does not compute the experts (experts.py does) and does not send rows to other ranks (strategies do)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Shapes: B samples, T positions, N = B * T tokens, E experts, K experts of a token, G groups of experts; R rows: of
# each expert those that it computes, one expert behind the other.

_LEAST = 1e-20
"""Added to the sum that divides the weights of a token, as in DeepSeek-V3: scores that are sigmoids may all be 0."""
_OF_GROUP = 2
"""The score of a group is the sum of its two largest (DeepSeek-AI 2024, "DeepSeek-V3", section 2.1.2)."""


@dataclass(frozen=True)
class RouterTraits:
    """How a router chooses.

    Attributes:
        experts: number of experts.
        chosen: experts of each token.
        normed: whether the weights of a token are divided by their sum.
        scores: "softmax" (over all experts) or "sigmoid" (of each expert by itself).
        groups, chosen_groups: experts lie in so many groups of equal size; a token chooses experts of so many of them.
        scale: factor on the weights.
        capacity: an expert takes at most so many times its share of the choices of each sample; 0: it takes all.
    """

    experts: int
    chosen: int
    normed: bool = True
    scores: str = "softmax"
    groups: int = 1
    chosen_groups: int = 1
    scale: float = 1.0
    capacity: float = 0.0

    def slots(self, positions: int) -> int:
        """How many choices of a sample of `positions` tokens an expert takes at most; 0: all."""
        share = self.capacity * self.chosen * positions / self.experts
        return min(positions, math.ceil(share)) if self.capacity else 0


class Routing(NamedTuple):
    """What a router has chosen.

    Attributes:
        experts_NK: the experts of each token, the one with the largest score first.
        weights_NK: by what the output of each of them is multiplied, in at least fp32.
        scores_NE: of all experts; each token's sum to 1.
    """

    experts_NK: Tensor
    weights_NK: Tensor
    scores_NE: Tensor


def choose(logits_NE: Tensor, traits: RouterTraits, bias_E: Tensor | None = None) -> Routing:
    """The experts of each token. `bias_E` is added to scores for the choice alone (Wang et al. 2024, "Auxiliary-Loss-
    Free Load Balancing Strategy for Mixture-of-Experts", equation 3)."""
    wide = torch.promote_types(logits_NE.dtype, torch.float32)
    logits_NE = logits_NE.to(wide)
    scores_NE = logits_NE.sigmoid() if traits.scores == "sigmoid" else logits_NE.softmax(-1)
    with torch.no_grad():
        wanted_NE = scores_NE if bias_E is None else scores_NE + bias_E.to(wide)
        if traits.chosen_groups < traits.groups:
            wanted_NE = _of_best_groups(wanted_NE, traits)
        experts_NK = wanted_NE.topk(traits.chosen, -1).indices
    weights_NK = scores_NE.gather(-1, experts_NK)
    if traits.normed:
        least = _LEAST if traits.scores == "sigmoid" else 0.0
        weights_NK = weights_NK / (weights_NK.sum(-1, keepdim=True) + least)
    if traits.scores == "sigmoid":
        scores_NE = scores_NE / (scores_NE.sum(-1, keepdim=True) + _LEAST)
    return Routing(experts_NK, weights_NK if traits.scale == 1.0 else weights_NK * traits.scale, scores_NE)


def _of_best_groups(wanted_NE: Tensor, traits: RouterTraits) -> Tensor:
    """The scores, without those outside of each token's best groups."""
    by_group_NGe = wanted_NE.view(len(wanted_NE), traits.groups, -1)
    sums_NG = by_group_NGe.topk(min(_OF_GROUP, by_group_NGe.shape[-1]), -1).values.sum(-1)
    best_NG = torch.zeros_like(sums_NG, dtype=torch.bool).scatter_(
        -1, sums_NG.topk(traits.chosen_groups, -1).indices, value=True
    )
    return by_group_NGe.masked_fill(~best_NG[..., None], -math.inf).flatten(-2)


class Slots(NamedTuple):
    """Where rows of tokens lie among the rows of all experts.

    Attributes:
        slots_NK: the row of each choice of a token; -1: its expert takes no more, so the choice is dropped.
        tokens_R: the token of each row; -1: a row without one.
        counts_E: rows of each expert.
        gaps: whether an index may be -1.
    """

    slots_NK: Tensor
    tokens_R: Tensor
    counts_E: Tensor
    gaps: bool


def every_slot(experts_NK: Tensor, experts: int) -> Slots:
    """A row for each choice. Rows of an expert are in the order of the tokens."""
    flat_R = experts_NK.flatten()
    order_R = flat_R.argsort(stable=True)
    slots_R = torch.empty_like(order_R)
    slots_R[order_R] = torch.arange(len(order_R), device=order_R.device)
    counts_E = torch.bincount(flat_R, minlength=experts)
    return Slots(slots_R.view_as(experts_NK), order_R // experts_NK.shape[1], counts_E, gaps=False)


def few_slots(experts_NK: Tensor, experts: int, samples: int, slots: int) -> Slots:
    """`slots` rows of each expert for each sample, [E, B, slots]. First choices come first, then earlier tokens.

    Samples do not compete: so it does not matter with which others one is computed (the groups of Lepikhin et al. 2020,
    "GShard", section 2.2, are samples).
    """
    tokens, chosen = experts_NK.shape
    experts_BKT = experts_NK.view(samples, -1, chosen).transpose(1, 2).reshape(samples, -1)
    taken_BXE = torch.nn.functional.one_hot(experts_BKT, experts).cumsum(1)
    place_BX = taken_BXE.gather(-1, experts_BKT[..., None])[..., 0] - 1
    first_B1 = torch.arange(samples, device=experts_NK.device)[:, None] * slots
    slots_BX = torch.where(place_BX < slots, experts_BKT * samples * slots + first_B1 + place_BX, -1)
    slots_NK = slots_BX.view(samples, chosen, -1).transpose(1, 2).reshape(tokens, chosen)
    rows = experts * samples * slots
    tokens_R = experts_NK.new_full((rows + 1,), -1)
    numbers_NK = torch.arange(tokens, device=experts_NK.device)[:, None].expand_as(slots_NK)
    tokens_R[slots_NK.where(slots_NK >= 0, rows)] = numbers_NK  # what is dropped goes to a row that nobody reads
    counts_E = experts_NK.new_full((experts,), samples * slots)
    return Slots(slots_NK, tokens_R[:rows].clone(), counts_E, gaps=True)


def dispatched(x_ND: Tensor, slots: Slots) -> Tensor:
    """The rows of all experts: [R, D]. A row without a token is 0."""
    rows_RD: Tensor = _Dispatched.apply(x_ND, slots.slots_NK, slots.tokens_R, slots.gaps)  # type: ignore[no-untyped-call]
    return rows_RD


def combined(rows_RD: Tensor, weights_NK: Tensor, slots: Slots) -> Tensor:
    """The sum of each token's rows, times their weights: [N, D]. What was dropped counts as 0."""
    sum_ND: Tensor = _Combined.apply(rows_RD, weights_NK, slots.slots_NK, slots.tokens_R, slots.gaps)  # type: ignore[no-untyped-call]
    return sum_ND


def permuted(rows_RD: Tensor, order_R: Tensor, inverse_R: Tensor) -> Tensor:
    """The rows in another order; `inverse_R`: that which puts them back."""
    out_RD: Tensor = _Permuted.apply(rows_RD, order_R, inverse_R)  # type: ignore[no-untyped-call]
    return out_RD


class _Permuted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, order_R: Tensor, inverse_R: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_R)
        return rows_RD[order_R]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out_RD: Tensor) -> tuple[Tensor, None, None]:
        (inverse_R,) = ctx.saved_tensors
        return d_out_RD[inverse_R], None, None


def _rows(of_RD: Tensor, at: Tensor, gaps: bool) -> Tensor:
    """Rows at some indices; 0 where an index is -1, if there are `gaps`."""
    if not len(of_RD):
        return of_RD.new_zeros(*at.shape, of_RD.shape[1])
    if not gaps:
        return of_RD.index_select(0, at)
    return of_RD.index_select(0, at.clamp(min=0)).masked_fill_((at < 0)[:, None], 0.0)


class _Dispatched(torch.autograd.Function):
    """See `dispatched`. Backward gathers, too: it adds up the same numbers in the same order on every device."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, slots_NK: Tensor, tokens_R: Tensor, gaps: bool) -> Tensor:
        ctx.save_for_backward(slots_NK)
        ctx.gaps = gaps
        return _rows(x_ND, tokens_R, gaps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_rows_RD: Tensor) -> tuple[Tensor, None, None, None]:
        (slots_NK,) = ctx.saved_tensors
        first_N, *others = slots_NK.unbind(1)
        d_x_ND = _rows(d_rows_RD, first_N, ctx.gaps)
        wide_ND = d_x_ND.to(torch.promote_types(d_x_ND.dtype, torch.float32))  # sums are rounded once
        for slots_N in others:
            wide_ND += _rows(d_rows_RD, slots_N, ctx.gaps)
        return wide_ND.to(d_x_ND.dtype), None, None, None


class _Combined(torch.autograd.Function):
    """See `combined`. Sums are in the dtype of the weights, and rounded once."""

    @staticmethod
    def forward(
        ctx: Any, rows_RD: Tensor, weights_NK: Tensor, slots_NK: Tensor, tokens_R: Tensor, gaps: bool
    ) -> Tensor:
        ctx.save_for_backward(rows_RD, weights_NK, slots_NK, tokens_R)
        ctx.gaps = gaps
        sum_ND = weights_NK.new_zeros(len(weights_NK), rows_RD.shape[1])
        for slots_N, weights_N in zip(slots_NK.unbind(1), weights_NK.unbind(1), strict=True):
            sum_ND.addcmul_(_rows(rows_RD, slots_N, gaps).to(sum_ND.dtype), weights_N[:, None])
        return sum_ND.to(rows_RD.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_sum_ND: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        rows_RD, weights_NK, slots_NK, tokens_R = ctx.saved_tensors
        rows, wide = len(rows_RD), weights_NK.dtype
        d_rows_RD = _rows(d_sum_ND.to(wide), tokens_R, ctx.gaps)
        # Numbers of rows get one more: what is dropped has gradient 0, and its weight goes to a row that nobody reads.
        d_weights_R, weights_R = weights_NK.new_zeros(2, rows + 1).unbind()
        torch.sum(rows_RD.to(wide) * d_rows_RD, 1, out=d_weights_R[:rows])
        weights_R[slots_NK] = weights_NK
        d_rows_RD.mul_(weights_R[:rows, None])
        return d_rows_RD.to(rows_RD.dtype), d_weights_R[slots_NK], None, None, None


class RouterLosses(NamedTuple):
    """The auxiliary losses of a router, each a sum over the tokens of a micro-batch."""

    balance: Tensor
    z: Tensor


def losses(logits_NE: Tensor, choice: Routing, samples: int) -> RouterLosses:
    """The auxiliary losses of a router, of a micro-batch of samples.

    balance: T E sum over e of f_e P_e, of each sample of T tokens. f_e: choices of expert e, divided by T. P_e: the
        mean score of e (Fedus et al. 2021, "Switch Transformers", equations 4 to 6, of each sample by itself as in
        DeepSeek-AI 2024, "DeepSeek-V3", equations 17 to 20). Perfect balance is K for each token. A loss of whole
        batches would depend on how these are divided into micro-batches; a sum over samples does not.
    z: (log Z)^2 of each token (Zoph et al. 2022, "ST-MoE", equation 5).
    """
    tokens, experts = choice.scores_NE.shape
    positions = tokens // samples
    with torch.no_grad():
        counts_BE = choices_of_samples(choice.experts_NK, samples, experts).to(choice.scores_NE.dtype)
    sums_BE = choice.scores_NE.view(samples, positions, experts).sum(1)
    balance = (counts_BE * sums_BE).sum() * (experts / positions)
    z = logits_NE.to(choice.scores_NE.dtype).logsumexp(-1).square().sum()
    return RouterLosses(balance, z)


def choices_of_samples(experts_NK: Tensor, samples: int, experts: int) -> Tensor:
    """How often each sample has chosen each expert: [B, E]."""
    found_BE = experts_NK.new_zeros(samples, experts)
    by_sample_BX = experts_NK.view(samples, -1)
    return found_BE.scatter_add_(1, by_sample_BX, torch.ones_like(by_sample_BX))


def attached(x: Tensor, auxiliary: Tensor, scale: float = 1.0, note: Callable[[], object] = lambda: None) -> Tensor:
    """x, whose backward pass adds `scale` times the gradient of the scalar `auxiliary`.

    Backward also calls `note`: once for each micro-batch, even where forward is computed a second time.
    """
    same: Tensor = _Attached.apply(x, auxiliary, scale, note)  # type: ignore[no-untyped-call]
    return same


def with_loads(weights_NK: Tensor, bias_E: Tensor, experts_NK: Tensor) -> Tensor:
    """The weights. The bias has as its gradient by how much each expert is chosen more often than the mean.

    So these numbers are summed over micro-batches and ranks as any gradient is. The update is a constant times their
    sign (DeepSeek-AI 2024, "DeepSeek-V3", section 2.1.2).
    """
    same: Tensor = _WithLoads.apply(weights_NK, bias_E, experts_NK)  # type: ignore[no-untyped-call]
    return same


class _WithLoads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights_NK: Tensor, bias_E: Tensor, experts_NK: Tensor) -> Tensor:
        ctx.save_for_backward(experts_NK)
        ctx.like = bias_E.dtype, len(bias_E)
        return weights_NK.view_as(weights_NK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_weights_NK: Tensor) -> tuple[Tensor, Tensor, None]:
        (experts_NK,), (dtype, experts) = ctx.saved_tensors, ctx.like
        counts_E = torch.bincount(experts_NK.flatten(), minlength=experts)
        return d_weights_NK, (counts_E - experts_NK.numel() / experts).to(dtype), None


class _Attached(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, auxiliary: Tensor, scale: float, note: Callable[[], object]) -> Tensor:
        ctx.note = note
        ctx.gradient = torch.full_like(auxiliary, scale)
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_x: Tensor) -> tuple[Tensor, Tensor, None, None]:
        ctx.note()
        return d_x, ctx.gradient, None, None
