"""In: a model, prompts as tokens. Out: the tokens that continue them, one for each prompt at a time.
Does not know text, files or terminals: `codescent.verbs.sample` does."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from codescent.base.errors import UserError
from codescent.models.decoder import Decoder
from codescent.operators.cache import KVCache
from codescent.operators.dropout import sample_keys

# Shapes: B rows (prompts that are not finished), T positions, V vocab_size.


@dataclass(frozen=True)
class Choice:
    """How the next token is drawn from the logits.

    Attributes:
        temperature: divides the logits; 0: always the likeliest token.
        top_k: only the k likeliest tokens; None: all.
        top_p: only the likeliest tokens that together have this probability, in (0, 1]; None: all.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def problems(self) -> Iterator[str]:
        """Why these values cannot be used, one sentence each."""
        if not (math.isfinite(self.temperature) and self.temperature >= 0.0):
            yield f"--temperature {self.temperature}: must be 0 (the likeliest token) or a finite positive number"
        if self.top_k is not None and self.top_k < 1:
            yield f"--top-k {self.top_k}: must be at least 1"
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            yield f"--top-p {self.top_p}: must be in (0, 1]"
        if not 0 <= self.seed < 1 << 63:
            yield f"--seed {self.seed}: must be in [0, 2^63)"


def context_start(length: int, seq_len: int) -> int:
    """How many of the oldest tokens of a text of `length` tokens the model no longer sees.

    Keys depend on absolute positions, so a shifted window is read again. It shifts by a quarter of seq_len at a time:
    the model sees at least 3/4 of seq_len tokens.
    """
    stride = max(1, seq_len // 4)
    return max(0, -(-(length - seq_len) // stride) * stride)


def choose(logits_BV: Tensor, choice: Choice, indices: Sequence[int], number: int) -> list[int]:
    """The next token of each row, drawn in fp64 by one uniform number that depends on (seed, index, number) alone.

    `indices` are the numbers of the rows' prompts, `number` is how many tokens were drawn for each before.

    Raises:
        UserError: logits that are not finite: the training has diverged.
    """
    if not bool(torch.isfinite(logits_BV).all()):
        raise UserError("the model's logits are not finite: its training has diverged; sample an earlier checkpoint")
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
    drawn_B1 = torch.searchsorted(sums_BV, (uniform_B1 * total_B1).clamp(max=total_B1 * (1.0 - 2.0**-52)), right=True)
    drawn_B1 = drawn_B1.clamp(max=top_k - 1)
    return cast(list[int], (drawn_B1 if ids_BV is None else ids_BV.gather(1, drawn_B1)).squeeze(1).tolist())


@dataclass
class _Row:
    """One text: its tokens so far, the number of its prompt, and the first token that the cache holds."""

    index: int
    tokens: list[int]
    start: int = 0


class _Reader:
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
        late = [n for n, row in enumerate(self.rows) if context_start(len(row.tokens), self.seq_len) != row.start]
        if late:
            texts, fresh = [self._window(self.rows[number])[:-1] for number in late], self._new_cache(len(late))
            if all(texts):
                self._read(fresh, texts)
            self.cache.replace(late, fresh)
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
        """Drop every row but these."""
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
    """Continue several prompts at once; a generator of one new token for each prompt at a time.

    The draws for a prompt depend on (seed, its number in `prompts`) and not on the other prompts. The tokens are those
    of the model without a cache, to rounding.

    Args:
        module: a Decoder; the generator sets evaluation mode while it runs.
        prompts: token ids, at least one each; lengths may differ and may exceed seq_len (see `context_start`).
        max_new_tokens: for each prompt at most.
        temperature, top_k, top_p, seed: see Choice.
        stop: token that ends a text; it is not yielded.
        vocab_size: only ids below it are drawn, where the tokenizer has fewer than the model; None: all ids.

    Yields:
        A token for each prompt, None for one that has ended; nothing more after all have.

    Raises:
        UserError: unusable values, all at once; logits that are not finite.
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
            reader = _Reader(module, [_Row(index, list(prompt)) for index, prompt in enumerate(prompts)])
            for number in range(max_new_tokens if prompts else 0):
                logits_BV = reader.first() if number == 0 else reader.next()
                tokens = choose(logits_BV[:, :vocab_size], choice, [row.index for row in reader.rows], number)
                given: list[int | None] = [None] * len(prompts)
                going = [at for at, token in enumerate(tokens) if token != stop]
                for at in going:
                    row = reader.rows[at]
                    row.tokens.append(tokens[at])
                    given[row.index] = tokens[at]
                if not going:
                    return
                yield given
                if len(going) < len(tokens):
                    reader.keep(going)
        finally:
            module.train(training)

    return tokens_of_each()
