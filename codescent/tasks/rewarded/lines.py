"""In: a file of JSON lines. Out: prompts, checked, as text or messages, with the whole line for whoever gives rewards.
Does not render messages as text (encode.py does)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from codescent.tasks.conversations.conversations import json_objects
from codescent.tasks.conversations.messages import (
    HALF,
    USER,
    Message,
    half_a_character,
    tools_of,
    wrong_message,
    wrong_tools,
)
from codescent.tasks.conversations.problems import Problems

if TYPE_CHECKING:
    from codescent.config.sections import Data

EXACT = "exact"
"""The value of data.reward for a comparison with the answer of the line."""


@dataclass(frozen=True)
class PromptLine:
    """A line: a prompt.

    Attributes:
        where: the place of the line: "FILE:LINE".
        prompt: a text, or messages.
        text: the line itself, as JSON.
    """

    where: str
    prompt: str | tuple[Message, ...]
    text: str
    tools: list[dict[str, Any]] | None = None

    @property
    def line(self) -> int:
        """The number of the line in its file, from 1."""
        return int(self.where.rpartition(":")[2])

    @property
    def messages(self) -> tuple[Message, ...]:
        """The prompt as messages."""
        return ({"role": USER, "content": self.prompt},) if isinstance(self.prompt, str) else self.prompt


def read_asked(path: Path, data: Data, *, with_template: bool) -> list[PromptLine]:
    """The lines of a file. Lines of white space are skipped.

    Raises:
        UserError: lines that cannot be used, with their numbers.
    """
    problems, found = Problems(), list[PromptLine]()
    for where, value in json_objects(path, problems):
        if wrong := list(_wrong(value, data, with_template=with_template)):
            for problem in wrong:
                problems.add(where, problem)
            continue
        prompt = value[data.prompt_key]
        tools = tools_of(value) if with_template else None
        found.append(PromptLine(where, prompt if isinstance(prompt, str) else tuple(prompt), json.dumps(value), tools))
    problems.refuse(path)
    return found


def _wrong(value: dict[str, Any], data: Data, *, with_template: bool) -> Iterator[str]:
    """Why a line cannot be used."""
    key, there = data.prompt_key, ", ".join(map(str, value)) or "nothing"
    if key not in value:
        yield f'no "{key}" (it has: {there}); set data.prompt_key'
        return
    prompt = value[key]
    if isinstance(prompt, str):
        yield from [f'"{key}" {HALF}'] if half_a_character(prompt) else []
    elif not isinstance(prompt, list) or not prompt:
        yield f'"{key}": a text or a list of messages is needed, found {json.dumps(prompt)[:40]}'
    elif not with_template:
        yield (
            f'"{key}": data.chat_template is needed to write messages as text: give the folder of the model that is '
            "tuned, its tokenizer_config.json or its chat_template.jinja"
        )
    else:
        yield from (
            f'"{key}": message {number}: {why}' for number, item in enumerate(prompt, 1) for why in wrong_message(item)
        )
    yield from wrong_tools(tools_of(value)) if with_template else []
    if data.reward == EXACT:
        answer = value.get(data.answer_key)
        if isinstance(answer, bool) or not isinstance(answer, str | int | float):
            found = "nothing" if answer is None else json.dumps(answer)[:40]
            yield (
                f'"{data.answer_key}": data.reward = "{EXACT}" compares with a text or a number, found {found}; set '
                "data.answer_key, or give a function as data.reward"
            )
