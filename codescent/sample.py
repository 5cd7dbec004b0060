"""In: a trained run and prompts. Out: their continuations, token by token.
Does not train or evaluate; reads the run folder, the tokenizer beside it, and the newest checkpoint."""

from __future__ import annotations

import math
import random
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from codescent import models
from codescent.build import model_shape
from codescent.config import Config
from codescent.data import tokenizers
from codescent.data.tokenizers import Tokenizer
from codescent.errors import UserError
from codescent.models.cache import KVCache
from codescent.record import RunFolder
from codescent.train.checkpoint import Checkpoints, read_tensors
from codescent.train.world import Place, choose_device

SHOWN_AGAIN = 6
"""Tokens that are decoded once more before the new ones: a character may be spread over several."""


@dataclass(frozen=True)
class Choice:
    """How the next token is drawn from the logits.

    `temperature` 0 takes the likeliest. `top_k` keeps the k likeliest, `top_p` the fewest likeliest ones whose
    probabilities add up to p (Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration", 3.1).

    Raises:
        UserError: values that make no sense, all of them.
    """

    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        problems = []
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            problems.append(f"--temperature {self.temperature}: must be a number of at least 0")
        if self.top_k is not None and self.top_k < 1:
            problems.append(f"--top-k {self.top_k}: must be at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            problems.append(f"--top-p {self.top_p}: must be above 0 and at most 1")
        if problems:
            raise UserError(*problems)

    def draw(self, logits_V: Tensor, uniform: float) -> int:
        """The next token.

        Args:
            logits_V: on the CPU.
            uniform: a random number in [0, 1), which decides.
        """
        if self.temperature == 0:
            return int(logits_V.argmax())
        order_K = logits_V.argsort(descending=True, stable=True)[: self.top_k]
        p_K = torch.softmax(logits_V[order_K].double() / self.temperature, -1)
        total_K = p_K.cumsum(-1)
        if self.top_p is not None:
            kept = int((total_K - p_K < self.top_p).sum())
            total_K = total_K[:kept]
        place = int(torch.searchsorted(total_K, uniform * float(total_K[-1]), right=True))
        return int(order_K[min(place, len(total_K) - 1)])


def window_start(length: int, seq_len: int) -> int:
    """Where the model's view of a text of `length` tokens begins: at 0 while it fits, then in jumps of half a context.

    A pure function of the length, so that a cache, which is made anew at each jump only, changes nothing.
    """
    half = max(1, seq_len // 2)
    return 0 if length <= seq_len else -(-(length - seq_len) // half) * half


@torch.no_grad()
def generate(
    module: nn.Module,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    choice: Choice,
    seed: int,
    *,
    cached: bool = True,
) -> Iterator[list[int]]:
    """Continue several prompts at once.

    Args:
        module: a model with `shape` and `forward(tokens_BT, cache=...)`, in eval mode.
        prompts: at least one token each; of a prompt longer than the context the end is read (`window_start`).
        max_new_tokens: tokens for each prompt.
        choice: how they are drawn.
        seed: with the number of the prompt it decides the text, whatever other prompts there are.
        cached: False computes every token from scratch: the same text, for tests.

    Yields:
        the next token of each prompt.
    """
    texts = [list(prompt) for prompt in prompts]
    randoms = [random.Random(f"{seed} {number}") for number in range(len(texts))]
    reader = _CachedReader(module) if cached else _PlainReader(module)
    logits_BV = reader.read(texts)
    for number in range(max_new_tokens):
        new = [choice.draw(logits_V, rng.random()) for logits_V, rng in zip(logits_BV, randoms, strict=True)]
        for text, token in zip(texts, new, strict=True):
            text.append(token)
        yield new
        if number + 1 < max_new_tokens:
            logits_BV = reader.read(texts)


class _PlainReader:
    """Logits of the next token of each text, each computed by itself from its whole view."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.device = next(module.parameters()).device
        shape = module.shape
        assert isinstance(shape, models.Shape)
        self.shape = shape

    def view(self, text: list[int]) -> Tensor:
        """What the model sees of a text: [1, T]."""
        return torch.tensor([text[window_start(len(text), self.shape.seq_len) :]], device=self.device)

    def read(self, texts: list[list[int]]) -> Tensor:
        """Logits [B, V], fp32 or wider, on the CPU."""
        rows = [self.module(self.view(text))[:, -1] for text in texts]
        return torch.cat(rows).float().cpu()


class _CachedReader(_PlainReader):
    """The same from keys and values that are kept: of each text only what is new is read."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.cache: KVCache | None = None
        self.starts: list[int] = []

    def _new_cache(self, num_rows: int) -> KVCache:
        return KVCache(self.shape, num_rows, self.device, next(self.module.parameters()).dtype)

    def read(self, texts: list[list[int]]) -> Tensor:
        """Logits [B, V], fp32 or wider, on the CPU."""
        starts = [window_start(len(text), self.shape.seq_len) for text in texts]
        if self.cache is None:
            logits_BV = self._first(texts, starts)
        else:
            moved = [row for row, start in enumerate(starts) if start != self.starts[row]]
            logits_BV = self._next(texts, moved)
        self.starts = starts
        return logits_BV.float().cpu()

    def _first(self, texts: list[list[int]], starts: list[int]) -> Tensor:
        self.cache = self._new_cache(len(texts))
        views = [text[start:] for text, start in zip(texts, starts, strict=True)]
        width = max(len(view) for view in views)
        tokens_BT = torch.tensor([view + [0] * (width - len(view)) for view in views], device=self.device)
        logits_BV: Tensor = self.module(tokens_BT, cache=self.cache, counts=[len(view) for view in views])
        return logits_BV

    def _next(self, texts: list[list[int]], moved: list[int]) -> Tensor:
        """One token more of each text; a text whose view has jumped is read anew, by itself."""
        assert self.cache is not None
        for row in moved:  # all but the last token; the common pass reads that
            fresh = self._new_cache(1)
            before = self.view(texts[row])[:, :-1]
            if before.shape[1]:
                self.module(before, cache=fresh)
            self.cache.replace([row], fresh)
        last_B1 = torch.tensor([[text[-1]] for text in texts], device=self.device)
        logits_BV: Tensor = self.module(last_B1, cache=self.cache)
        return logits_BV


def sample_run(
    run: Path,
    *,
    prompts: Sequence[str] | None = None,
    tokens: int = 200,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    num: int = 1,
    device: str = "auto",
) -> None:
    """Print continuations of `prompts` by the newest checkpoint of a run: one as it comes, several when all are done.

    Args:
        run: the run folder.
        prompts: None: one text from nothing, that is, from the end of a document or a line.
        tokens: tokens of each continuation.
        temperature, top_k, top_p, seed: see `Choice` and `generate`.
        num: continuations of each prompt.
        device: auto, cpu or cuda.

    Raises:
        UserError: not a run folder, no checkpoint, no tokenizer, a prompt that it does not know.
    """
    choice = Choice(temperature, top_k, top_p)
    module, tokenizer = load_run(run, device)
    texts = [text for text in (prompts or [""]) for _ in range(num)]
    encoded = [_encode(tokenizer, text) for text in texts]
    stream = generate(module, encoded, tokens, choice, seed)
    if len(texts) == 1:
        printer = _Printer(tokenizer, texts[0])
        for (token,) in stream:
            printer.token(token)
        printer.end()
        return
    columns = list(zip(*stream, strict=True))
    for number, (text, column) in enumerate(zip(texts, columns, strict=True)):
        print(f"--- {number + 1} of {len(texts)} ---")
        print(text + tokenizer.decode(list(column)))


def load_run(run: Path, device: str = "auto") -> tuple[nn.Module, Tokenizer]:
    """The model of a run's newest checkpoint, in eval mode, and its tokenizer.

    Raises:
        UserError: not a run folder, no complete checkpoint, no tokenizer.
    """
    folder = RunFolder.open(run)
    saved = Checkpoints(folder.checkpoints, 1, False).latest()
    problems = []
    if saved is None:
        problems.append(f"{folder.checkpoints}: no complete checkpoint; train until one is saved (checkpoint.every)")
    if not folder.tokenizer.is_file():
        problems.append(
            f"{folder.tokenizer}: absent; the token shards that the run was trained on came without a tokenizer"
        )
    if problems or saved is None:
        raise UserError(*problems)
    tokenizer = tokenizers.load(folder.tokenizer)
    config = Config.model_validate(tomllib.loads(folder.config_text))
    shape = model_shape(config, tokenizer.vocab_size)
    module = models.construct(config.model.kind, shape)
    names = {f"model.{name}": name for name, _ in module.named_parameters()}
    tensors = read_tensors(saved.path, names)
    module.load_state_dict({names[name]: tensor for name, tensor in tensors.items()}, assign=True)
    return module.to(choose_device(device, Place())).eval(), tokenizer


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokens of a prompt; an empty one begins after the end of a document, or of a line where no token means that."""
    if text:
        return [int(token) for token in tokenizer.encode(text)]
    return [tokenizer.separator] if tokenizer.separator is not None else _encode(tokenizer, "\n")


class _Printer:
    """Prints a text as its tokens come, and a character only when all of its bytes are there."""

    def __init__(self, tokenizer: Tokenizer, prompt: str) -> None:
        self.tokenizer = tokenizer
        self.before: list[int] = []
        self.waiting: list[int] = []
        sys.stdout.write(prompt)

    def token(self, token: int) -> None:
        """One token more."""
        self.waiting.append(token)
        self._print(last=False)

    def end(self) -> None:
        """No token more: whatever is left is printed as it is."""
        self._print(last=True)
        sys.stdout.write("\n")
        sys.stdout.flush()

    def _print(self, *, last: bool) -> None:
        known = self.tokenizer.decode(self.before)
        text = self.tokenizer.decode(self.before + self.waiting)
        if not last and text.endswith("�") and len(self.waiting) < SHOWN_AGAIN:
            return
        sys.stdout.write(text[len(known) :])
        sys.stdout.flush()
        self.before = (self.before + self.waiting)[-SHOWN_AGAIN:]
        self.waiting = []
