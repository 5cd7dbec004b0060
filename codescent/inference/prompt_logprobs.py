"""In: a decoder, the tokens of a text. Out: how likely each of them is after those before it.
Does not generate (engine.py does), and uses no cache of keys and values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from codescent.inference.request import TokenLogprob
from codescent.models.decoder import Decoder

ROWS = 256
"""So many positions' logarithms are computed at a time: those of all would take V numbers for each token."""


@torch.inference_mode()
def prompt_logprobs(module: Decoder, tokens: Sequence[int], top: int) -> list[TokenLogprob | None]:
    """For each token its logarithm of probability, and the `top` likeliest tokens in its place. The first has none.

    `tokens`: at most `seq_len`; at least one.
    """
    if len(tokens) < 2:
        return [None] * len(tokens)
    device = module.tok.weight.device
    inputs_1T = torch.tensor(tokens[:-1], device=device)[None]
    logits_TV: Tensor = module.eval()(inputs_1T)[0]
    found: list[TokenLogprob | None] = [None]
    for first in range(0, len(logits_TV), ROWS):
        piece_RV = torch.log_softmax(logits_TV[first : first + ROWS].float(), -1)
        nexts_R = torch.tensor(tokens[first + 1 : first + 1 + len(piece_RV)], device=device)
        own = piece_RV.gather(1, nexts_R[:, None])[:, 0].tolist()
        best = piece_RV.topk(top, -1) if top else None
        for row, (token, logprob) in enumerate(zip(nexts_R.tolist(), own, strict=True)):
            others = () if best is None else zip(best.indices[row].tolist(), best.values[row].tolist(), strict=True)
            found.append(TokenLogprob(token, logprob, tuple(others)))
    return found
