"""In: a run folder and prompts. Out: the texts with which its newest checkpoint continues them, on the terminal.
Does not choose tokens (models/generate does) and does not change the run folder."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TextIO

from codescent import models
from codescent.base.errors import UserError
from codescent.data.tokenizers.tokenizer import REPLACEMENT, Tokenizer
from codescent.models.generate import Choice, generate
from codescent.preflight import saved_plan
from codescent.record import RunFolder
from codescent.tasks.conversations.conversations import HALF, half_a_character
from codescent.tasks.task import Prompts
from codescent.verbs.trained import Trained, device_of, find, module_of

# On a terminal: control characters of a model's own text could move the cursor or worse.
_VISIBLE = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"} | {127: 0x2421}


def main(arguments: Namespace) -> int:
    """Write the texts to standard output."""
    sample_run(**vars(arguments))
    return 0


class TextStream:
    """Text of tokens as they come; a character of several tokens when it is whole.

    `decode` gives the text of token ids, with U+FFFD for bytes that are not UTF-8.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._context: list[int] = []  # tokens whose text is out: some decoders look back
        self._held: list[int] = []  # tokens whose text is not
        self._shown = 0  # characters of both that are out

    def push(self, token: int) -> str:
        """The text that this token completes, perhaps none."""
        self._held.append(token)
        text = self._decode(self._context + self._held)
        # A decoder makes one U+FFFD, at the end, of bytes that may still become a character; any other is final.
        return self._show(text.removesuffix(REPLACEMENT), whole=not text.endswith(REPLACEMENT))

    def finish(self) -> str:
        """The text of the remaining tokens, however incomplete."""
        return self._show(self._decode(self._context + self._held), whole=True)

    def _show(self, text: str, *, whole: bool) -> str:
        piece = text[self._shown :]
        self._shown = max(self._shown, len(text))
        if whole and self._held:
            self._context, self._held = self._held, []
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
) -> list[str]:
    """Let the newest checkpoint of a run continue prompts, and write the texts as they come.

    Args:
        run: the run folder.
        prompts: texts to continue, or what a user asks where the run has a chat template; None: one text from the
            beginning of a document.
        tokens: largest number of new tokens of a text; it ends earlier where the model ends the document.
        temperature: see Choice, as for top_k, top_p and seed.
        top_k: draw from the likeliest tokens only.
        top_p: draw from the likeliest tokens that make up this probability.
        seed: the same on the same machine gives the same texts.
        num: texts for each prompt.
        device: "auto", "cpu" or "cuda".
        out: where to write; None: standard output.

    Returns:
        The texts, each with its prompt, in the order of the prompts.

    Raises:
        UserError: every problem that is found before the model is read; a damaged checkpoint.
    """
    where = device_of(device)
    problems = [*Choice(temperature, top_k, top_p, seed).problems(), *([where] if isinstance(where, str) else [])]
    problems += [f"{flag} {n}: must be at least 1" for flag, n in (("--tokens", tokens), ("--num", num)) if n < 1]
    try:
        trained, tokenizer = _find(Path(run))
        prompter = trained.task.prompts(trained.ask, tokenizer)
        starts = _encode(prompter, prompts)
    except UserError as error:
        raise UserError(*problems, *error.problems) from error
    if problems or isinstance(where, str):
        raise UserError(*problems)
    texts, ids = zip(*(start for start in starts for _ in range(num)))
    module, vocab_size = module_of(trained, where), tokenizer.vocab_size
    stream = generate(module, ids, tokens, temperature, top_k, top_p, seed, prompter.stop, vocab_size)
    return _write(texts, stream, tokenizer, sys.stdout if out is None else out)


def _find(run: Path) -> tuple[Trained, Tokenizer]:
    folder = RunFolder.open(run)
    kind = saved_plan(folder).model.kind
    problems = []
    if kind not in models.GENERATING:
        problems.append(
            f'{folder.path}: model.kind = "{kind}": text is generated by {" and ".join(models.GENERATING)} alone so far'
        )
    if not folder.tokenizer.is_file():
        problems.append(f"{folder.tokenizer}: the run kept no tokenizer, so its tokens cannot be read as text")
    try:
        trained = find(run)
    except UserError as error:
        raise UserError(*problems, *error.problems) from error
    if problems or trained.tokenizer is None:
        raise UserError(*problems)
    return trained, trained.tokenizer


def _encode(prompter: Prompts, prompts: Sequence[str] | None) -> list[tuple[str, list[int]]]:
    """Each prompt as it is shown, with its tokens; an empty one begins a document."""
    starts, problems = [], []
    for prompt in prompts or [""]:
        if half_a_character(prompt):
            problems.append(f"--prompt {prompt!r}: {HALF}, or bytes that are not UTF-8")
            continue
        try:
            starts.append(prompter.encode(prompt))
        except UserError as error:
            problems += [f"--prompt {prompt!r}: {problem}" for problem in error.problems]
    if problems:
        raise UserError(*problems)
    return starts


def _write(prompts: Sequence[str], stream: Iterator[list[int | None]], tokenizer: Tokenizer, out: TextIO) -> list[str]:
    """Write the first text as it comes and the others after it; returns them all."""
    texts, decoders = list(prompts), [TextStream(tokenizer.decode) for _ in prompts]

    def show(text: str) -> None:
        if out.isatty():
            text = text.translate(_VISIBLE)
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
