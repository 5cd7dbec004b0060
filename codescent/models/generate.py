"""In: a decoder, prompts as token ids. Out: generated token ids; each step yields one new token per prompt.
Does not tokenize or print text: `codescent.verbs.sample` does."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from codescent.base.device import has_fp64
from codescent.base.errors import UserError
from codescent.models.decoder import Decoder
from codescent.operators.cache import KVCache
from codescent.operators.dropout import sample_keys

# Shapes: B rows (prompts that are not finished), T positions, V vocab_size.


@dataclass(frozen=True)
class Choice:
    """How the next token is sampled from the logits.

    Attributes:
        temperature: divides the logits; 0: always the likeliest token.
        top_k: only the k likeliest tokens; None: all.
        top_p: only the likeliest tokens that together have this probability, in (0, 1]; None: all.
        seed: of the random numbers, in [0, 2^63).
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def problems(self) -> Iterator[str]:
        """One sentence for each value that is out of range."""
        if not (math.isfinite(self.temperature) and self.temperature >= 0.0):
            yield f"--temperature {self.temperature}: must be 0 (the likeliest token) or a finite positive number"
        if self.top_k is not None and self.top_k < 1:
            yield f"--top-k {self.top_k}: must be at least 1"
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            yield f"--top-p {self.top_p}: must be in (0, 1]"
        if not 0 <= self.seed < 1 << 63:
            yield f"--seed {self.seed}: must be in [0, 2^63)"


def context_start(length: int, seq_len: int) -> int:
    """Number of tokens to drop from the start of a text of `length` tokens, so that the rest fits into seq_len.

    Cached keys depend on absolute positions, so the model must read a shifted window again. The window therefore shifts
    by a quarter of seq_len at a time. Of a long text the model always sees at least 3/4 of seq_len tokens.
    """
    stride = max(1, seq_len // 4)
    return max(0, -(-(length - seq_len) // stride) * stride)


def choose(logits_BV: Tensor, choice: Choice, indices: Sequence[int], number: int) -> list[int]:
    """Sample the next token of each row, in fp64. The random number of a row depends only on (seed, index, number).

    `indices`: index of each row's prompt. `number`: how many tokens each row has generated so far.

    Raises:
        UserError: logits that are not finite: the training has diverged.
    """
    if not bool(torch.isfinite(logits_BV).all()):
        raise UserError(
            "the model's logits are not finite: its training has diverged; sample an earlier checkpoint (--step N)"
        )
    if not has_fp64(logits_BV.device):
        logits_BV = logits_BV.cpu()
    if choice.temperature == 0.0:
        return cast(list[int], logits_BV.argmax(-1).tolist())
    vocab_size = logits_BV.shape[1]
    top_k = min(choice.top_k or vocab_size, vocab_size)
    top_p = choice.top_p or 1.0
    ids_BV: Tensor | None = None
    wide_BV = logits_BV.double()
    if top_k < vocab_size or top_p < 1.0:
        wide_BV, ids_BV = wide_BV.topk(top_k)
    sums_BV = torch.softmax(wide_BV / choice.temperature, -1).cumsum(-1)
    total_B1 = sums_BV[:, -1:]
    if top_p < 1.0:
        last_B1 = (sums_BV < top_p * total_B1).sum(-1, keepdim=True).clamp(max=top_k - 1)
        total_B1 = sums_BV.gather(1, last_B1)
    keys_B = sample_keys(choice.seed, number, torch.tensor(indices, device=logits_BV.device))
    uniform_B1 = ((keys_B >> 11) & (2**53 - 1)).double()[:, None] * 2.0**-53
    # The first token whose sum exceeds u * total; u < 1, but the product may round up to the total.
    next_B1 = torch.searchsorted(sums_BV, (uniform_B1 * total_B1).clamp(max=total_B1 * (1.0 - 2.0**-52)), right=True)
    next_B1 = next_B1.clamp(max=top_k - 1)
    return cast(list[int], (next_B1 if ids_BV is None else ids_BV.gather(1, next_B1)).squeeze(1).tolist())


@dataclass
class _Row:
    """One text: the index of its prompt, its tokens so far, and the index of its first token in the cache."""

    index: int
    tokens: list[int]
    start: int = 0


class _CachedDecoder:
    """The model and the cache of unfinished rows. The cache holds all but the last token of each row."""

    def __init__(self, module: Decoder, rows: list[_Row]) -> None:
        self.module, self.rows = module, rows
        self.seq_len = module.shape.seq_len
        self.device = module.tok.weight.device
        self.cache = self._new_cache(len(rows))

    def _new_cache(self, num_rows: int) -> KVCache:
        shape = self.module.shape
        size = (num_rows, shape.seq_len, shape.num_kv_heads, shape.head_dim)
        return KVCache(shape.num_layers, size, self.device, self.module.tok.weight.dtype)

    @torch.no_grad()
    def first(self) -> Tensor:
        """Logits [B, V] after the prompts."""
        return self._read(self.cache, [self._window(row) for row in self.rows])

    @torch.no_grad()
    def next(self) -> Tensor:
        """Logits [B, V] after the token that was last appended to each row."""
        shifted = [n for n, row in enumerate(self.rows) if context_start(len(row.tokens), self.seq_len) != row.start]
        if shifted:
            texts, cache = [self._window(self.rows[number])[:-1] for number in shifted], self._new_cache(len(shifted))
            if all(texts):
                self._read(cache, texts)
            self.cache.replace(shifted, cache)
        return self._read(self.cache, [row.tokens[-1:] for row in self.rows])

    def _window(self, row: _Row) -> list[int]:
        """The tokens of a row that the model sees now."""
        row.start = context_start(len(row.tokens), self.seq_len)
        return row.tokens[row.start :]

    def _read(self, cache: KVCache, texts: list[list[int]]) -> Tensor:
        width = max(map(len, texts))
        padded = [text + [0] * (width - len(text)) for text in texts]
        tokens_BT, counts = torch.tensor(padded, device=self.device), list(map(len, texts))
        logits: Tensor = self.module(tokens_BT, cache=cache, counts=counts)
        return logits

    def keep(self, numbers: list[int]) -> None:
        """Drop all rows except `numbers`, which are indices of rows."""
        self.rows = [self.rows[number] for number in numbers]
        self.cache.keep(numbers)


def generate(
    module: nn.Module,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    stop: int | None = None,
    vocab_size: int | None = None,
) -> Iterator[list[int | None]]:
    """Continue several prompts at once. Each step yields one new token per prompt.

    The random numbers for a prompt depend on the seed and on the prompt's index, not on the other prompts. The tokens
    equal those of the model without a cache, up to rounding.

    Args:
        module: a Decoder; the generator sets evaluation mode while it runs.
        prompts: token ids, at least one each; lengths may differ and may exceed seq_len (see `context_start`).
        max_new_tokens: largest number of new tokens per prompt.
        temperature, top_k, top_p, seed: see Choice.
        stop: token that ends a text; it is not yielded.
        vocab_size: sample only ids below it, if the tokenizer has fewer ids than the model; None: all ids.

    Yields:
        A list with one token per prompt, None for a prompt that has ended. Stops when all prompts have ended.

    Raises:
        UserError: all values that are out of range, at once; logits that are not finite.
    """
    assert isinstance(module, Decoder)
    choice = Choice(temperature, top_k, top_p, seed)
    problems = [*choice.problems(), *(f"prompt {n}: no tokens" for n, prompt in enumerate(prompts) if not prompt)]
    if max_new_tokens < 1:
        problems.append(f"--tokens {max_new_tokens}: must be at least 1")
    if problems:
        raise UserError(*problems)

    def tokens_of_each() -> Iterator[list[int | None]]:
        training = module.training
        module.eval()
        try:
            reader = _CachedDecoder(module, [_Row(index, list(prompt)) for index, prompt in enumerate(prompts)])
            for number in range(max_new_tokens if prompts else 0):
                logits_BV = reader.first() if number == 0 else reader.next()
                tokens = choose(logits_BV[:, :vocab_size], choice, [row.index for row in reader.rows], number)
                new_tokens: list[int | None] = [None] * len(prompts)
                unfinished = [at for at, token in enumerate(tokens) if token != stop]
                for at in unfinished:
                    row = reader.rows[at]
                    row.tokens.append(tokens[at])
                    new_tokens[row.index] = tokens[at]
                if not unfinished:
                    return
                yield new_tokens
                if len(unfinished) < len(tokens):
                    reader.keep(unfinished)
        finally:
            module.train(training)

    return tokens_of_each()
