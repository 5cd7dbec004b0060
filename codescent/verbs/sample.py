"""In: a run folder, prompts. Out: printed text, which a checkpoint of the run generates as continuation of prompts.
Does not choose tokens (models/generate.py does) and does not change the run folder."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TextIO

import torch

from codescent import models
from codescent.base.cores import memory_bytes
from codescent.base.device import total_memory
from codescent.base.errors import UserError
from codescent.base.visible import visible
from codescent.build import saved_plan
from codescent.data.tokenizers.tokenizer import REPLACEMENT, Tokenizer
from codescent.models.generate import Choice, generate
from codescent.record import RunFolder
from codescent.tasks.conversations.messages import HALF, half_a_character
from codescent.tasks.task import Prompts
from codescent.verbs.trained import Trained, dataset_of, device_of, find, module_of


def main(arguments: Namespace) -> int:
    """Generate texts and write them to standard output."""
    sample_run(**vars(arguments))
    return 0


class TextStream:
    """Decodes tokens one by one. A character of several tokens is returned when its last token arrives.

    `decode` returns the text of token ids, with U+FFFD for bytes that are not UTF-8.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._context: list[int] = []  # tokens whose text was returned: some decoders need the tokens before
        self._pending: list[int] = []  # tokens whose text was not returned yet, or only in part
        self._shown = 0  # number of returned characters of both

    def push(self, token: int) -> str:
        """Add a token. Returns the text that it completes, or ""."""
        self._pending.append(token)
        text = self._decode(self._context + self._pending)
        # Bytes that may still become a character are one U+FFFD at the end of the text. Any other U+FFFD is final.
        return self._show(text.removesuffix(REPLACEMENT), whole=not text.endswith(REPLACEMENT))

    def finish(self) -> str:
        """Return the text of the remaining tokens, even if their last character is incomplete."""
        return self._show(self._decode(self._context + self._pending), whole=True)

    def _show(self, text: str, *, whole: bool) -> str:
        piece = text[self._shown :]
        self._shown = max(self._shown, len(text))
        if whole and self._pending:
            self._context, self._pending = self._pending, []
            self._shown = len(self._decode(self._context))
        return piece


def sample_run(
    run: Path,
    prompts: Sequence[str] | None = None,
    tokens: int = 200,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    num: int = 1,
    device: str = "auto",
    out: TextIO | None = None,
    *,
    best: bool = False,
    step: int | None = None,
    ema: bool = False,
    example: bool = False,
    option: str = "--prompt",
) -> list[str]:
    """Continue prompts with a checkpoint of a run. The first text is written token by token.

    Args:
        run: the run folder.
        prompts: texts to continue, or user messages if the run has a chat template; None: one text that begins a
            document, or the answer to "Hello".
        tokens: largest number of new tokens of a text; a text ends earlier if the model ends the document.
        temperature, top_k, top_p, seed: see Choice. The same seed on the same machine gives the same texts.
        num: number of texts for each prompt.
        device: "auto", "cpu", "cuda", "xpu" or "mps".
        out: where to write; None: standard output, with control characters made visible (`visible`).
        best: use the checkpoint with the lowest validation loss.
        step: use the checkpoint of this step. The default is the newest checkpoint.
        ema: the moving average of its weights, not the weights.
        example: if the task's texts continue prompts, continue one of the run's validation split.
        option: what sets the prompts, for messages.

    Returns:
        The texts, each with its prompt, in the order of the prompts.

    Raises:
        UserError: all problems that are found before the model is loaded, or a damaged checkpoint.
    """
    where = device_of(device)
    problems = [*Choice(temperature, top_k, top_p, seed).problems(), *([where] if isinstance(where, str) else [])]
    problems += [f"{flag} {n}: must be at least 1" for flag, n in (("--tokens", tokens), ("--num", num)) if n < 1]
    try:
        trained, tokenizer = _find(Path(run), best=best, step=step, ema=ema)
        prompter = trained.task.prompts(trained.request, tokenizer)
        starts = (_example(trained, tokenizer) if example else None) or _encode(prompter, prompts, option)
    except UserError as error:
        raise UserError(*problems, *error.problems) from error
    if problems or isinstance(where, str):
        raise UserError(*problems)
    _refuse_many(trained, starts, num, tokens, where)
    texts, ids = zip(*(start for start in starts for _ in range(num)))
    module, vocab_size = module_of(trained, where), tokenizer.vocab_size
    stream = generate(module, ids, tokens, temperature, top_k, top_p, seed, prompter.stop, vocab_size)
    return _write(texts, stream, tokenizer, out)


def _find(run: Path, *, best: bool, step: int | None, ema: bool) -> tuple[Trained, Tokenizer]:
    folder = RunFolder.open(run)
    kind = saved_plan(folder).model.kind
    problems = []
    if not models.generates(kind):
        able = " and ".join(models.GENERATING)
        problems.append(f'{folder.path}: model.kind = "{kind}": only {able} can generate text')
    if not folder.tokenizer.is_file():
        problems.append(f"{folder.tokenizer}: the run folder has no tokenizer, so tokens cannot be decoded to text")
    try:
        trained = find(run, best=best, step=step, ema=ema)
    except UserError as error:
        raise UserError(*problems, *error.problems) from error
    if problems or trained.tokenizer is None:
        raise UserError(*problems)
    return trained, trained.tokenizer


def _example(trained: Trained, tokenizer: Tokenizer) -> list[tuple[str, list[int]]] | None:
    """A prompt of the validation split: its text and its tokens; None: the task's texts begin documents."""
    work = saved_plan(trained.folder).work
    ids = trained.task.example(lambda: dataset_of(trained).source("validation", work.seq_len, work.positions(-1)))
    return None if ids is None else [(tokenizer.decode(ids), ids)]


def _refuse_many(
    trained: Trained, starts: Sequence[tuple[str, list[int]]], num: int, tokens: int, device: torch.device
) -> None:
    """Raise UserError if the memory has no room for `num` texts of each prompt, each with `tokens` new tokens."""
    longest = max(len(ids) for _, ids in starts) + tokens
    if num * len(starts) > (most := _most_texts(trained, longest, device)):
        each = f" for each of {len(starts)} prompts" if len(starts) > 1 else ""
        raise UserError(f"--num {num}{each}: keys and values of {most:,} texts at most fit into the memory")


def _most_texts(trained: Trained, longest: int, device: torch.device) -> int:
    """For how many texts of `longest` tokens the memory has room: at least for their keys and values."""
    shape = trained.resolved.shape
    if device.type == "cpu":  # memory is taken as it is written; numbers are fp32 or wider
        numbers, size, memory = min(longest, shape.seq_len), 4, memory_bytes()
    else:
        numbers, size, memory = shape.seq_len, 2, total_memory(device)
    return max(1, memory // (2 * shape.num_layers * numbers * shape.num_kv_heads * shape.head_dim * size))


def _encode(prompter: Prompts, prompts: Sequence[str] | None, option: str) -> list[tuple[str, list[int]]]:
    """For each prompt the text to print and its tokens. An empty prompt begins a document. `option`: see sample_run."""
    starts, problems = [], []
    for prompt in prompts or [prompter.default]:
        of = f"{option} {prompt!r}" if prompts else f"the prompt {prompt!r}, as {option} is not given"
        if half_a_character(prompt):
            problems.append(f"{of}: {HALF}, or bytes that are not UTF-8")
            continue
        try:
            starts.append(prompter.encode(prompt))
        except UserError as error:
            problems += [f"{of}: {problem}" for problem in error.problems]
    if problems:
        raise UserError(*problems)
    return starts


def _write(
    prompts: Sequence[str], stream: Iterator[list[int | None]], tokenizer: Tokenizer, given: TextIO | None
) -> list[str]:
    """Write the first text while it is generated, then the others. Returns all texts."""
    texts, decoders = list(prompts), [TextStream(tokenizer.decode) for _ in prompts]
    out = sys.stdout if given is None else given

    def show(text: str) -> None:
        if given is None or out.isatty():  # control characters of a model's text could move the cursor, or worse
            text = visible(text)
        encoding = out.encoding or "utf-8"
        out.write(text.encode(encoding, "replace").decode(encoding))
        out.flush()

    def title(number: int) -> None:
        if len(texts) > 1:
            show(f"--- {number + 1} of {len(texts)} ---\n")

    title(0)
    show(texts[0])
    for tokens in stream:
        for number, token in enumerate(tokens):
            piece = "" if token is None else decoders[number].push(token)
            texts[number] += piece
            if number == 0 and piece:
                show(piece)
    for number, decoder in enumerate(decoders):
        rest = decoder.finish()
        texts[number] += rest
        if number == 0:
            show(rest)
        else:
            title(number)
            show(texts[number])
        show("\n")
    return texts
