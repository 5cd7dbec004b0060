"""In: logits, how each row samples. Out: the next token of each row, with logarithms of probabilities if asked for.
Does not compute logits, and keeps no state: random numbers follow from seeds (see `uniform`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from codescent.base.device import has_fp64
from codescent.inference.request import Sampling, TokenLogprob

# Shapes: B rows, V vocab_size, C candidates of a row, the likeliest first.
_BITS = (1 << 64) - 1
_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
DIVERGED = "the model's logits are not finite: its training has diverged; take an earlier checkpoint"
NOTHING_ALLOWED = "no token is left to choose: the biases exclude all that may follow"
_FIRST = 1024
"""Candidates that top_p and min_p look at first: to sort a whole vocabulary takes milliseconds."""


class Draw(NamedTuple):
    """How the next token of a row is chosen: by `sampling`, as the token at `place` (0: the first new one).

    `allowed_V`: bool, which tokens the grammar allows; None: all.
    """

    sampling: Sampling
    place: int
    allowed_V: Tensor | None = None


class NextToken(NamedTuple):
    """A row's next token; `token` None: there is none, for the reason in `error`."""

    token: int | None
    logprob: TokenLogprob | None = None
    error: str = ""


def _mix(state: int) -> int:
    state = (state + _GOLDEN) & _BITS
    state = ((state ^ (state >> 30)) * _MIX_1) & _BITS
    state = ((state ^ (state >> 27)) * _MIX_2) & _BITS
    return state ^ (state >> 31)


def uniform(seed: int, place: int, number: int) -> float:
    """A random number in [0, 1) with 53 bits, of seed, place and number alone: SplitMix64 (Steele, Lea, Flood 2014).

    It is that of `operators.dropout.sample_keys`, without tensors.
    """
    return (_mix(_mix(_mix(seed) ^ place) ^ number) >> 11) * 2.0**-53


def choose(logits_BV: Tensor, draws: Sequence[Draw]) -> list[NextToken]:
    """The next token of each row. What is drawn is computed in fp64, in which fp32 logits are exact."""
    sound = torch.isfinite(logits_BV.sum(-1, dtype=torch.promote_types(logits_BV.dtype, torch.float32))).tolist()
    if not has_fp64(logits_BV.device):
        logits_BV = logits_BV.cpu()
    plain = [row for row, draw in enumerate(draws) if draw.sampling.temperature == 0.0 and not _is_changed(draw)]
    tokens = dict[int, int | None](zip(plain, _rows(logits_BV, plain).argmax(-1).tolist(), strict=True))
    others = [row for row in range(len(draws)) if row not in tokens and sound[row]]
    tokens |= zip(others, _drawn(_rows(logits_BV, others), [draws[row] for row in others]), strict=True)
    found = []
    for row, draw in enumerate(draws):
        if not sound[row]:
            found.append(NextToken(None, error=DIVERGED))
            continue
        token, wanted = tokens[row], draw.sampling.logprobs
        logprob = None if wanted is None or token is None else _logprob(logits_BV[row], token, wanted)
        found.append(NextToken(token, logprob, "" if token is not None else NOTHING_ALLOWED))
    return found


def _rows(tensor_BV: Tensor, rows: Sequence[int]) -> Tensor:
    return tensor_BV if len(rows) == len(tensor_BV) else tensor_BV[list(rows)]


def _is_changed(draw: Draw) -> bool:
    return bool(draw.sampling.logit_bias) or draw.allowed_V is not None


def _is_cut(sampling: Sampling) -> bool:
    return not (sampling.top_k is None and sampling.top_p in (None, 1.0) and not sampling.min_p)


def _drawn(logits_BV: Tensor, draws: Sequence[Draw]) -> list[int | None]:
    """The tokens of rows that are not simply the likeliest; None: the grammar or the biases allow none."""
    if not draws:
        return []
    logits_BV, samplings = logits_BV.double(), [draw.sampling for draw in draws]
    changed = [row for row, draw in enumerate(draws) if _is_changed(draw)]
    if changed:
        logits_BV = logits_BV.clone()
    for row in changed:
        logits_BV[row] = _allowed(logits_BV[row], draws[row])
    closed = [row for row in changed if float(logits_BV[row].max()) == -math.inf]
    tokens: dict[int, int | None] = dict.fromkeys(closed)
    greedy = [row for row, one in enumerate(samplings) if one.temperature == 0.0 and row not in tokens]
    tokens |= zip(greedy, _rows(logits_BV, greedy).argmax(-1).tolist(), strict=True)
    for is_cut, draw_rows in ((False, _from_all), (True, _from_likeliest)):
        rows = [row for row, one in enumerate(samplings) if row not in tokens and _is_cut(one) == is_cut]
        if rows:
            some = [samplings[row] for row in rows]
            shares = [uniform(one.seed, draws[row].place, one.number) for one, row in zip(some, rows, strict=True)]
            scaled_BV = _rows(logits_BV, rows) / _column(logits_BV, [one.temperature for one in some])
            tokens |= zip(rows, draw_rows(scaled_BV, some, _column(logits_BV, shares)).tolist(), strict=True)
    return [tokens[row] for row in range(len(draws))]


def _column(like: Tensor, numbers: Sequence[float]) -> Tensor:
    return like.new_tensor(numbers)[:, None]


def _at_shares(sums_BC: Tensor, totals_B1: Tensor, shares_B1: Tensor) -> Tensor:
    """The first index [B, 1] whose sum exceeds a share of the total. An index that adds nothing is never chosen."""
    # A share is below 1, but the product may round up to the total.
    wanted_B1 = (shares_B1 * totals_B1).clamp(max=totals_B1 * (1.0 - 2.0**-52))
    return torch.searchsorted(sums_BC, wanted_B1, right=True)


def _from_all(scaled_BV: Tensor, samplings: Sequence[Sampling], shares_B1: Tensor) -> Tensor:
    """A token of each row, by its probability."""
    sums_BV = torch.softmax(scaled_BV, -1).cumsum(-1)
    return _at_shares(sums_BV, sums_BV[:, -1:], shares_B1)[:, 0].clamp(max=scaled_BV.shape[1] - 1)


def _from_likeliest(scaled_BV: Tensor, samplings: Sequence[Sampling], shares_B1: Tensor) -> Tensor:
    """A token of each row, of those that top_k, top_p and min_p leave."""
    rows, every = scaled_BV.shape
    most = [min(one.top_k or every, every) for one in samplings]
    size = min(every, max(_FIRST, *(one.top_k or 0 for one in samplings)))
    tokens_B, is_enough = _among(scaled_BV, samplings, shares_B1, most, size)
    again = [row for row in range(rows) if not is_enough[row]]
    if again:
        some = [samplings[row] for row in again]
        tokens_B[again] = _among(scaled_BV[again], some, shares_B1[again], [most[row] for row in again], every)[0]
    return tokens_B


def _among(
    scaled_BV: Tensor, samplings: Sequence[Sampling], shares_B1: Tensor, most: Sequence[int], size: int
) -> tuple[Tensor, list[bool]]:
    """A token of each row, of its `size` likeliest; and whether all that are left for it are among these."""
    logits_BC, ids_BC = scaled_BV.topk(size)
    top_B1 = logits_BC[:, :1]
    weights_BC = (logits_BC - top_B1).exp()
    sums_BC = weights_BC.cumsum(-1)
    last_B1 = torch.tensor([[min(k, size) - 1] for k in most], device=scaled_BV.device)
    # top_p is a share of the k likeliest. Without top_k they are all, whose sum needs no order.
    every_B1 = (scaled_BV - top_B1).exp().sum(-1, keepdim=True)
    is_all_B1 = torch.tensor([[k > size] for k in most], device=scaled_BV.device)
    total_B1 = torch.where(is_all_B1, every_B1, sums_BC.gather(1, last_B1))
    shares_of_p = _column(scaled_BV, [math.inf if one.top_p in (None, 1.0) else one.top_p or 0.0 for one in samplings])
    least_B1 = _column(scaled_BV, [one.min_p or 0.0 for one in samplings])
    last_B1 = last_B1.minimum((sums_BC < shares_of_p * total_B1).sum(-1, keepdim=True))
    last_B1 = last_B1.minimum((weights_BC >= least_B1).sum(-1, keepdim=True) - 1)
    found_B1 = _at_shares(sums_BC, sums_BC.gather(1, last_B1), shares_B1).minimum(last_B1)
    is_enough = [last < size - 1 or k <= size for last, k in zip(last_B1[:, 0].tolist(), most, strict=True)]
    return ids_BC.gather(1, found_B1)[:, 0], is_enough


def _allowed(logits_V: Tensor, draw: Draw) -> Tensor:
    """The logits of a row with its bias, -inf where the grammar allows no token."""
    if draw.sampling.logit_bias:
        logits_V = _biased(logits_V, draw.sampling.logit_bias)
    return logits_V if draw.allowed_V is None else logits_V.masked_fill(~draw.allowed_V.to(logits_V.device), -math.inf)


def _biased(logits_V: Tensor, bias: Mapping[int, float]) -> Tensor:
    ids = torch.tensor(list(bias), device=logits_V.device)
    more = torch.tensor(list(bias.values()), dtype=logits_V.dtype, device=logits_V.device)
    return logits_V.index_add(0, ids, more)


def _logprob(logits_V: Tensor, token: int, wanted: int) -> TokenLogprob:
    logprobs_V = logits_V.double().log_softmax(-1)
    if not wanted:
        return TokenLogprob(token, float(logprobs_V[token]))
    best, ids = logprobs_V.topk(min(wanted, len(logprobs_V)))
    return TokenLogprob(token, float(logprobs_V[token]), tuple(zip(ids.tolist(), best.tolist(), strict=True)))
