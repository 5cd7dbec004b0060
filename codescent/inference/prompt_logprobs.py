"""In: a decoder, the tokens of texts. Out: how likely each of them is after those before it.
Does not generate (engine.py does), and uses no cache of keys and values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from codescent.inference.request import TokenLogprob
from codescent.models.decoder import Decoder

LOGITS_BYTES = 1 << 29
"""Memory for logits at a time. For more of a text it is read again."""
TOKENS_AT_ONCE = 4096
"""Tokens of texts that are read at a time, with padding."""
Continued = tuple[Sequence[int], Sequence[int]]
"""The tokens before, at least one, and those that are scored, at least one."""


def prompt_logprobs(module: Decoder, tokens: Sequence[int], top: int) -> list[TokenLogprob | None]:
    """For each token its logarithm of probability, and the `top` likeliest tokens in its place. The first has none.

    `tokens`: at most `seq_len`; at least one.
    """
    found: list[TokenLogprob | None] = [None]
    for wanted_N, logprobs_NV in _logprobs(module, [tokens[:-1]], [range(len(tokens) - 1)]):
        nexts_N = torch.tensor(tokens[1:])[wanted_N]
        own = logprobs_NV.gather(1, nexts_N[:, None])[:, 0].tolist()
        best = logprobs_NV.topk(min(top, logprobs_NV.shape[1]), -1) if top else None
        for row, (token, logprob) in enumerate(zip(nexts_N.tolist(), own, strict=True)):
            others = () if best is None else zip(best.indices[row].tolist(), best.values[row].tolist(), strict=True)
            found.append(TokenLogprob(token, logprob, tuple(others)))
    return found


def continuation_scores(module: Decoder, texts: Sequence[Continued]) -> list[tuple[float, bool]]:
    """For each text the sum of the logarithms of its scored tokens, and whether each of them is the likeliest one.

    A text that is longer than the model's context, and one token more, loses its first tokens.
    """
    most = module.shape.seq_len + 1
    ids = [[*before, *scored][-most:] for before, scored in texts]
    sums, greedy = [0.0] * len(texts), [True] * len(texts)
    for numbers in _batches([len(one) for one in ids]):
        wanted = [range(len(ids[n]) - 1 - min(len(texts[n][1]), len(ids[n]) - 1), len(ids[n]) - 1) for n in numbers]
        rows = [(n, at) for n, places in zip(numbers, wanted, strict=True) for at in places]
        begin = 0
        for wanted_N, logprobs_NV in _logprobs(module, [ids[n][:-1] for n in numbers], wanted):
            part = rows[begin : begin + len(wanted_N)]
            begin += len(part)
            nexts_N = torch.tensor([ids[n][at + 1] for n, at in part])
            own_N, best_N = logprobs_NV.gather(1, nexts_N[:, None])[:, 0], logprobs_NV.argmax(-1)
            for (n, _), logprob, is_best in zip(part, own_N.tolist(), (best_N == nexts_N).tolist(), strict=True):
                sums[n] += logprob
                greedy[n] &= is_best
    return list(zip(sums, greedy, strict=True))


def _batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Numbers of texts that are read together: the longest ones first, and texts of like lengths."""
    order = sorted(range(len(lengths)), key=lambda number: lengths[number])
    while order:
        count = max(1, TOKENS_AT_ONCE // lengths[order[-1]])
        yield order[-count:]
        del order[-count:]


@torch.inference_mode()
def _logprobs(
    module: Decoder, texts: Sequence[Sequence[int]], wanted: Sequence[range]
) -> Iterator[tuple[Tensor, Tensor]]:
    """For the wanted places of texts, piece by piece: the places [N] in B * T, and logarithms [N, V] of what follows.

    On the CPU, in fp32, or in fp64 of a model in fp64. Longer texts follow the padding of shorter ones, which no token
    sees.
    """
    device, longest = module.tok.weight.device, max(map(len, texts))
    tokens_BT = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts], device=device)
    places_N = torch.tensor([row * longest + at for row, places in enumerate(wanted) for at in places])
    at_once = max(1, LOGITS_BYTES // (4 * module.shape.vocab_size))
    training = module.training
    module.eval()
    try:
        for first in range(0, len(places_N), at_once):
            piece_N = places_N[first : first + at_once]
            logits_NV = module(tokens_BT, wanted_N=piece_N.to(device)).cpu()
            yield piece_N, torch.log_softmax(logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32)), -1)
    finally:
        module.train(training)
