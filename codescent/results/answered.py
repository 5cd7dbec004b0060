"""In: the log of `codescent serve --log`. Out: what it says of each answered request, without the texts.
Does not write the log (serving/request_log.py does), and keeps no text of a user."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from codescent.base.errors import UserError
from codescent.base.published import in_words
from codescent.base.reading import open_regular

MOST_LINE_BYTES = 1 << 26
"""A longer line is left out: a request has at most 8 MB, and its answer is shorter than the model's context."""
STEP = re.compile(r"step (\d{1,18})")
LAST_S, MOST_TOKENS, MOST_LOSS = 253_402_300_799.0, 1e12, 1e6
"""More seconds (of the year 9999), tokens, and nats than a log has. Beyond them a date has no number."""


@dataclass(frozen=True)
class AnsweredPrompt:
    """A prompt that was answered.

    Attributes:
        time_s: when, in seconds since 1970.
        step: of the checkpoint that answered; None: the log does not say it.
        prompt_tokens: of the prompt.
        loss: mean loss of the prompt's tokens but the first, in nats; NaN: it has one token.
        tokens: of its first answer.
        is_cut: whether that answer was ended by the largest number of tokens.
        seconds: from the request to the end of all its answers.
    """

    time_s: float
    step: int | None
    prompt_tokens: int
    loss: float
    tokens: int
    is_cut: bool
    seconds: float


def read_log(path: Path) -> tuple[list[AnsweredPrompt], int]:
    """The prompts of a log in the order of time, and how many lines are damaged.

    Raises UserError: it cannot be read, or has lines of another kind alone.
    """
    found, damaged = list[AnsweredPrompt](), 0
    try:
        with open_regular(path) as file:
            while line := file.readline(MOST_LINE_BYTES):
                try:
                    found += _prompts(json.loads(line))
                except (ValueError, ArithmeticError, RecursionError, LookupError, TypeError):
                    damaged += 1
    except OSError as error:
        raise UserError(f"--requests {path}: {in_words(error)}") from error
    if damaged and not found:
        raise UserError(f"--requests {path}: is no log of `codescent serve --log`: none of its lines is an answer")
    return sorted(found, key=lambda one: one.time_s), damaged


def _prompts(line: Mapping[str, Any]) -> Iterator[AnsweredPrompt]:
    """The prompts of one request. Raises ArithmeticError, LookupError, TypeError, ValueError: it is no such line."""
    if line["version"] != 1:
        raise ValueError("another version")
    step = STEP.search(line["which"])
    each = len(line["tokens"]) // len(line["prompt_tokens"])
    for at, (count, loss) in enumerate(zip(line["prompt_tokens"], line["prompt_losses"], strict=True)):
        yield AnsweredPrompt(
            _number(line["time_s"], LAST_S),
            None if step is None else int(step[1]),
            int(_number(count, MOST_TOKENS)),
            math.nan if loss is None or count < 2 else _number(loss, MOST_LOSS),
            int(_number(line["tokens"][at * each], MOST_TOKENS)),
            line["finish"][at * each] == "length",
            _number(line["seconds"], LAST_S),
        )


def _number(value: float, most: float) -> float:
    """A number of the log. Raises TypeError: it is none; ValueError: no log has such a one."""
    if not 0.0 <= value <= most:
        raise ValueError(f"{value} is not in [0, {most}]")
    return float(value)
