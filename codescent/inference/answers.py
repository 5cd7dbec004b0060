"""In: an engine, prompts. Out: the answer to each, whole, as tokens.
Does not decide how tokens are drawn (`Sampling` does) and knows no reward (codescent/tasks does)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from codescent.base.errors import RunFailed
from codescent.data.samples import AnswerTokens
from codescent.inference.engine import Engine
from codescent.inference.request import Finish, Sampling
from codescent.inference.schedule import Capacity
from codescent.models.decoder import Decoder

PAGE_SIZE, STEP_TOKENS = 16, 1024
"""Tokens of a page of keys and values, and tokens that a pass reads at most."""
MOST_ROWS, MOST_BYTES = 256, 4 << 30
"""Answers that are written at a time, and bytes of their keys and values, at most."""


def capacity_of(module: Decoder, prompts: Sequence[Sequence[int]], new_tokens: int) -> Capacity:
    """Room for as many answers at a time as may be, each behind its prompt. All ranks of tp get the same: bytes are
    those of the whole model."""
    pages, shape = math.ceil((max(map(len, prompts), default=0) + new_tokens) / PAGE_SIZE), module.shape
    of_token = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * module.tok.weight.element_size()
    rows = max(1, min(len(prompts), MOST_ROWS, MOST_BYTES // (pages * PAGE_SIZE * of_token)))
    return Capacity(rows, rows * pages, PAGE_SIZE, max(STEP_TOKENS, rows))


def answers_of(
    engine: Engine, prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling], end: int | None
) -> list[AnswerTokens]:
    """The answer to each prompt. `end`: the token that ends one. Raises RunFailed: the logits are not finite."""
    places, tokens, cut = dict[int, int](), [list[int]() for _ in prompts], [False] * len(prompts)
    for number, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
        places[engine.add(prompt, sampling)] = number
    while engine.busy:
        for output in engine.step():
            place = places[output.request]
            if output.token is not None:
                tokens[place].append(output.token)
            if output.finished is Finish.ERROR:
                raise RunFailed(f"answers cannot be written: {output.error}")
            if output.finished is Finish.STOP and end is not None:
                tokens[place].append(end)
            cut[place] = cut[place] or output.finished is Finish.LENGTH
    return [AnswerTokens(*one) for one in zip(tokens, cut, strict=True)]


def likeliest_answers(
    module: torch.nn.Module, prompts: Sequence[Sequence[int]], new_tokens: int, end: int | None, vocab_size: int
) -> list[AnswerTokens]:
    """The likeliest answer of a model to each prompt, of up to `new_tokens` tokens with ids below `vocab_size`."""
    assert isinstance(module, Decoder)
    stops = () if end is None else (end,)
    engine = Engine(module, None, capacity_of(module, prompts, new_tokens), stops=stops, vocab_size=vocab_size)
    return answers_of(engine, prompts, [Sampling(temperature=0.0, max_new_tokens=new_tokens)] * len(prompts), end)
