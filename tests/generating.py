"""In: a decoder, prompts, how to sample. Out: the new tokens of each prompt, by an engine.
Does not test anything."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from codescent.inference.engine import Engine
from codescent.inference.request import Finish, Sampling
from codescent.inference.schedule import Capacity
from codescent.models.decoder import Decoder


def engine_for(module: nn.Module, rows: int = 8, *, stops: Collection[int] = (), **options: Any) -> Engine:
    """An engine with room for `rows` whole texts, in pages of 4 tokens."""
    assert isinstance(module, Decoder)
    pages = options.pop("pages", rows * -(-module.shape.seq_len // 4))
    capacity = Capacity(rows, pages, 4, options.pop("step_tokens", 64))
    return Engine(module, None, capacity, stops=stops, **options)


def tokens_of(engine: Engine, prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling]) -> list[list[int]]:
    """The new tokens of each prompt."""
    first = engine.add([0], Sampling(max_new_tokens=1)) + 1  # the id of the first prompt
    engine.cancel(first - 1)
    found: list[list[int]] = [[] for _ in prompts]
    for outputs in engine.texts(prompts, samplings):
        for output in outputs:
            assert output.finished is not Finish.ERROR, output.error
            if output.token is not None and output.request >= first:
                found[output.request - first].append(output.token)
    return found


def continued(
    module: nn.Module, prompts: Sequence[Sequence[int]], new_tokens: int, stop: int | None = None, **sampling: Any
) -> list[list[int]]:
    """The new tokens of each prompt, all with the same sampling; text i has the number i."""
    vocab_size = sampling.pop("vocab_size", None)
    plain = Sampling(max_new_tokens=new_tokens, slides=True, **sampling)
    engine = engine_for(module, stops=() if stop is None else (stop,), vocab_size=vocab_size)
    return tokens_of(engine, prompts, [replace(plain, number=number) for number in range(len(prompts))])
