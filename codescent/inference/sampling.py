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


class Chosen(NamedTuple):
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


def choose(logits_BV: Tensor, draws: Sequence[Draw]) -> list[Chosen]:
    """The next token of each row. What is drawn is computed in fp64 (fp32 logits are exact in it)."""
    sound = torch.isfinite(logits_BV.sum(-1, dtype=torch.promote_types(logits_BV.dtype, torch.float32))).tolist()
    if not has_fp64(logits_BV.device):
        logits_BV = logits_BV.cpu()
    plain = [row for row, draw in enumerate(draws) if draw.sampling.temperature == 0.0 and not _is_changed(draw)]
    tokens: dict[int, int | None] = {}
    if plain:
        of_plain = logits_BV if len(plain) == len(draws) else logits_BV[plain]
        tokens = dict(zip(plain, of_plain.argmax(-1).tolist(), strict=True))
    found = []
    for row, draw in enumerate(draws):
        if not sound[row]:
            found.append(Chosen(None, error=DIVERGED))
            continue
        token = tokens[row] if row in tokens else _drawn(logits_BV[row], draw)
        wanted = draw.sampling.logprobs
        logprob = None if wanted is None or token is None else _logprob(logits_BV[row], token, wanted)
        found.append(Chosen(token, logprob, "" if token is not None else NOTHING_ALLOWED))
    return found


def _is_changed(draw: Draw) -> bool:
    return bool(draw.sampling.logit_bias) or draw.allowed_V is not None


def _drawn(logits_V: Tensor, draw: Draw) -> int | None:
    """The token of one row; None: the grammar or the biases allow none."""
    sampling = draw.sampling
    logits_V = logits_V.double()
    if sampling.logit_bias:
        logits_V = _biased(logits_V, sampling.logit_bias)
    if draw.allowed_V is not None:
        logits_V = logits_V.masked_fill(~draw.allowed_V, -math.inf)
    if _is_changed(draw) and float(logits_V.max()) == -math.inf:
        return None
    if sampling.temperature == 0.0:
        return int(logits_V.argmax())
    share = uniform(sampling.seed, draw.place, sampling.number)
    scaled_V = logits_V / sampling.temperature
    if sampling.top_k is None and sampling.top_p in (None, 1.0) and not sampling.min_p:
        return _at_share(torch.softmax(scaled_V, -1).cumsum(-1), share)
    ids_C, sums_C = _candidates(scaled_V, sampling)
    return int(ids_C[_at_share(sums_C, share)])


def _at_share(sums_C: Tensor, share: float) -> int:
    """The first index whose sum exceeds `share` of the last sum. An index that adds nothing is never chosen."""
    total = float(sums_C[-1])
    # share < 1, but the product may round up to the total.
    wanted_1 = sums_C.new_tensor([min(share * total, total * (1.0 - 2.0**-52))])
    return min(int(torch.searchsorted(sums_C, wanted_1, right=True)), len(sums_C) - 1)


def _candidates(scaled_V: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """The tokens that top_k, top_p and min_p leave, likeliest first; and the sums of their weights, likeliest first."""
    most = min(sampling.top_k or len(scaled_V), len(scaled_V))
    size = most if sampling.top_k is not None else min(_FIRST, most)
    # top_p is a share of the k likeliest. Without top_k they are all, whose sum needs no order.
    top = float(scaled_V.max())
    every = float((scaled_V - top).exp().sum())
    while True:
        logits_C, ids_C = scaled_V.topk(size)
        sums_C = (logits_C - top).exp().cumsum(-1)
        total = float(sums_C[-1]) if size == most and sampling.top_k is not None else every
        kept = size
        if sampling.top_p is not None and sampling.top_p < 1.0:
            kept = min(kept, int((sums_C < sampling.top_p * total).sum()) + 1)
        if sampling.min_p:
            kept = min(kept, int((logits_C - top >= math.log(sampling.min_p)).sum()))
        if kept < size or size == most:
            return ids_C[: max(kept, 1)], sums_C[: max(kept, 1)]
        size = most  # the first candidates were not enough


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
