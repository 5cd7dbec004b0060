"""In: a run folder, prompts. Out: printed text, which a checkpoint of the run generates as continuation of prompts.
Does not choose tokens (the engine of codescent/inference does) and does not change the run folder."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TextIO

from codescent.base.errors import UserError
from codescent.base.visible import visible
from codescent.build import saved_plan
from codescent.data.tokenizers.tokenizer import Tokenizer
from codescent.inference.grammar import Grammar
from codescent.inference.open import engine_of, find_generating, stops_of
from codescent.inference.request import Finish, Output, Sampling
from codescent.inference.trained import Trained, dataset_of, device_of
from codescent.tasks.conversations.messages import HALF, half_a_character
from codescent.tasks.task import Prompts
from codescent.verbs.sampling_options import choices_of, problems_of, refuse_as_options

ROWS = 64
"""Texts that are generated at a time; others wait."""
MOST_TEXTS = 100_000
"""More texts would be held in memory before the first of them is seen."""


def main(arguments: Namespace) -> int:
    """Generate texts and write them to standard output."""
    choices = choices_of(arguments)
    sample_run(**vars(arguments), **choices)
    return 0


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
    min_p: float | None = None,
    stop: Sequence[str] = (),
    logit_bias: Mapping[int, float] = MappingProxyType({}),
    grammar: Grammar | None = None,
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
        temperature, top_k, top_p, min_p, seed, stop, logit_bias, grammar: see `Sampling`. The same seed on the same
            machine gives the same texts. A stop text is looked for in what is generated, not in the prompt.
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
    sampling = Sampling(
        temperature,
        top_k,
        top_p,
        min_p,
        seed=seed,
        max_new_tokens=tokens,
        stop=tuple(stop),
        logit_bias=logit_bias,
        grammar=grammar,
        slides=True,
    )
    problems = [*problems_of(sampling), *([where] if isinstance(where, str) else [])]
    problems += [f"--num {num}: must be at least 1"] if num < 1 else []
    try:
        trained, tokenizer = find_generating(Path(run), best=best, step=step, ema=ema)
        prompter = trained.task.prompts(trained.request, tokenizer)
        starts = (_example(trained, tokenizer) if example else None) or _encode(prompter, prompts, option)
    except UserError as error:
        raise UserError(*problems, *error.problems) from error
    if problems or isinstance(where, str):
        raise UserError(*problems)
    if (total := num * len(starts)) > MOST_TEXTS:
        each = f" for each of {len(starts)} prompts" if len(starts) > 1 else ""
        raise UserError(f"--num {num}{each}: {total:,} texts; at most {MOST_TEXTS:,}")
    engine = engine_of(trained, tokenizer, where, stops_of(prompter), rows=min(ROWS, total))
    refuse_as_options(engine, sampling)
    texts, ids = zip(*(start for start in starts for _ in range(num)))
    return _write(texts, engine.texts(ids, [replace(sampling, number=number) for number in range(total)]), out)


def _example(trained: Trained, tokenizer: Tokenizer) -> list[tuple[str, list[int]]] | None:
    """A prompt of the validation split: its text and its tokens; None: the task's texts begin documents."""
    work = saved_plan(trained.folder).work
    ids = trained.task.example(lambda: dataset_of(trained).source("validation", work.seq_len, work.positions(-1)))
    return None if ids is None else [(tokenizer.decode(ids), ids)]


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


def _write(prompts: Sequence[str], steps: Iterator[list[Output]], given: TextIO | None) -> list[str]:
    """Write the first text while it is generated, then the others. Returns all texts. `steps`: of `Engine.texts`."""
    texts, out = list(prompts), sys.stdout if given is None else given

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
    for outputs in steps:
        for output in outputs:
            if output.finished is Finish.ERROR:
                raise UserError(f"{output.error}, such as --step N")
            texts[output.request] += output.text
            if output.request == 0 and output.text:
                show(output.text)
    for number, text in enumerate(texts):
        if number:
            title(number)
            show(text)
        show("\n")
    return texts
