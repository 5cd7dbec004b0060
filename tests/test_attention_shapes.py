"""In: texts that grow token by token, texts of any length. Out: attention sees few shapes off the CPU; the same tokens.
Does not need a device: the branch for other devices is taken here, and its values are computed on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from generating import engine_for, tokens_of
from torch import Tensor

from codescent import models
from codescent.inference.request import Sampling
from codescent.models.gpt2.module import GPT2
from codescent.models.initialize import initialize_
from codescent.models.transformer import translate
from codescent.models.transformer.module import Transformer
from codescent.operators import attention, cache
from codescent.operators.cache import few_lengths
from codescent.tasks.language_model.evaluate import _nats

SIZES = {"num_layers": 2, "num_heads": 2, "hidden_dim": 16, "vocab_size": 61}
PROMPTS = [[5, 3, 8], list(range(30, 52))]
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def built(kind: str, **sizes: Any) -> Any:
    shape = models.shape_of(kind, sizes)
    made: type[GPT2] | type[Transformer] = GPT2 if kind == "gpt2" else Transformer
    module = made(shape, 1024, "cpu").double().eval()
    initialize_(module, 3, models.parameters_of(kind, shape))
    for name, parameter in module.named_parameters():
        parameter.data *= 8.0 if parameter.ndim == 2 else 1.0
        if name == "norm.weight":  # else a tied head repeats what it reads
            parameter.data[::2] = -1.0
    return module


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """`elsewhere(yes)`: from now on lengths are those of another device, or those of the CPU."""

    def switch(yes: bool) -> None:
        for place in (cache, translate):
            monkeypatch.setattr(
                place, "few_lengths", lambda length, most, _: few_lengths(length, most, CUDA if yes else CPU)
            )
        monkeypatch.setattr(cache, "reads_in_place", lambda _: not yes)

    return switch


@pytest.fixture
def lengths(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The lengths of the keys that attention with a cache or without a causal mask sees."""
    seen: set[int] = set()
    plain = F.scaled_dot_product_attention

    def noting(q: Tensor, k: Tensor, *others: Any, **options: Any) -> Tensor:
        seen.add(k.shape[2])
        return plain(q, k, *others, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", noting)
    return seen


def test_a_length_is_rounded_up_off_the_cpu_only() -> None:
    assert [few_lengths(length, 300, CPU) for length in (1, 128, 129, 300)] == [1, 128, 129, 300]
    assert [few_lengths(length, 300, CUDA) for length in (1, 128, 129, 257, 300)] == [128, 128, 256, 300, 300]
    assert few_lengths(3, 7, torch.device("meta")) == 7


@pytest.mark.parametrize("seq_len", [512, 200])
def test_300_tokens_are_sampled_with_few_lengths(
    seq_len: int, elsewhere: Callable[[bool], None], lengths: set[int]
) -> None:
    module = built("gpt2", **SIZES, seq_len=seq_len)
    logits: dict[bool, list[Tensor]] = {True: [], False: []}
    texts: dict[bool, list[list[int]]] = {}
    samplings = [Sampling(seed=1, number=number, max_new_tokens=300, slides=True) for number in range(2)]
    for yes in (False, True):
        elsewhere(yes)
        lengths.clear()
        hook = module.register_forward_hook(lambda _module, _inputs, out, yes=yes: logits[yes].append(out))
        texts[yes] = tokens_of(engine_for(module), PROMPTS, samplings)
        hook.remove()
        if yes:
            assert lengths == ({128, 256, 384} if seq_len == 512 else {128, 256})
        else:
            assert len(lengths) > 100
    assert texts[True] == texts[False]
    assert len({token for text in texts[True] for token in text}) > 20
    torch.testing.assert_close(logits[True], logits[False], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("causal", [True, False])
def test_a_target_is_decoded_with_one_length(
    causal: bool, elsewhere: Callable[[bool], None], lengths: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"num_encoder_layers": 1, "num_decoder_layers": 2, "source_len": 5, "target_len": 30}
    sizes |= {name: SIZES[name] for name in ("num_heads", "hidden_dim", "vocab_size")} | {"causal": causal}
    module = built("transformer", **sizes)
    plain = attention.causal_attention

    def noting(qkv: Tensor, *others: Any) -> Tensor:
        lengths.add(qkv.shape[1])
        return plain(qkv, *others)

    monkeypatch.setattr(attention, "causal_attention", noting)
    source, source_lengths = torch.arange(15).view(3, 5), torch.tensor([5, 2, 3])
    found, read = [], dict[bool, list[Tensor]]({True: [], False: []})
    for yes in (False, True):
        elsewhere(yes)
        lengths.clear()
        hook = module.norm.register_forward_hook(lambda _module, _inputs, out, yes=yes: read[yes].append(out))
        found.append(translate.greedy(module, source, source_lengths, begin=9, end=60))
        hook.remove()
        assert lengths == ({5, 30} if yes else {5, *range(1, 31)})
    assert torch.equal(*found)
    torch.testing.assert_close(read[True], read[False], rtol=1e-10, atol=1e-10)
    assert len({round(float(x_BD.sum()), 6) for x_BD in read[True]}) > 3


@pytest.mark.parametrize("tokens", [2, 400, 1000, 1111])
def test_a_text_of_any_length_is_scored_with_at_most_three_shapes(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of full batches of windows, of the last batch, and of the last window: not of each window."""
    module, shapes, plain = built("gpt2", **SIZES, seq_len=32), set(), attention.causal_attention

    def noting(qkv: Tensor, *others: Any) -> Tensor:
        shapes.add(tuple(qkv.shape))
        return plain(qkv, *others)

    monkeypatch.setattr(attention, "causal_attention", noting)
    monkeypatch.setattr("codescent.tasks.score.TOKENS_AT_ONCE", 96)
    _nats(module, np.arange(tokens) % 61, 32, CPU)
    assert 1 <= len(shapes) <= 3
