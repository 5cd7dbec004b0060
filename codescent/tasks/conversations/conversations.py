"""In: a file of JSON lines. Out: its conversations, one per line, checked; a prompt and a response become two messages.
Does not render a conversation as text (chat_template.py and dataset.py do)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from codescent.base.errors import UserError
from codescent.base.json_damage import json_problem
from codescent.base.reading import open_regular
from codescent.data.text.compressed import BAD_ARCHIVE, read_unpacked, unpacking
from codescent.tasks.conversations.forms import refused_form
from codescent.tasks.conversations.messages import (
    ASSISTANT,
    HALF,
    USER,
    Message,
    half_a_character,
    is_learned,
    tools_of,
    wrong_message,
    wrong_tools,
)
from codescent.tasks.conversations.problems import Problems

if TYPE_CHECKING:
    from codescent.config.sections import Data

TURNS, PAIR = "messages", "a prompt and a response"
TOOLS = "tools"


@dataclass(frozen=True)
class Conversation:
    """A line as messages.

    Attributes:
        where: the place of the line: "FILE:LINE".
        tools: JSON objects that describe functions, for the chat template; None: the line has none.
        unused: the keys of the line that are not read and have a value.
    """

    where: str
    messages: tuple[Message, ...]
    tools: list[dict[str, Any]] | None = None
    unused: tuple[str, ...] = ()


def read_conversations(path: Path, data: Data, *, with_template: bool) -> list[Conversation]:
    """The conversations of a file of JSON lines. All lines must have one kind: messages, or prompt and response.

    A line with both is read as messages with a chat template, and as prompt and response without one. Keys of [data]
    give the names of a line's keys. Lines of white space are skipped.
    Raises UserError: lines that are not conversations, or not of the first line's kind; messages without a template.
    """
    problems, forms, found = Problems(), Problems(), []
    first_kind = first_where = ""
    for where, value in json_objects(path, problems):
        kind = _kind(value, data, with_template=with_template)
        if (form := refused_form(value, data.response_key)) and (kind == PAIR or any(_wrong_messages(value, data))):
            forms.add(where, form)
            continue
        if not first_kind:
            first_kind, first_where = kind, where
        if kind == TURNS and not with_template:
            raise UserError(
                f'{where}: "{data.messages_key}": data.chat_template is needed to write messages as text: give the '
                "folder of the model that is tuned, its tokenizer_config.json or its chat_template.jinja"
            )
        if kind != first_kind:
            problems.add(
                where, f"{kind}, but the first line ({first_where}) has {first_kind}: all lines must have one kind"
            )
        elif wrong := list(_wrong(value, data, kind, with_template=with_template)):
            for problem in wrong:
                problems.add(where, problem)
        else:
            found.append(_conversation(where, value, data, kind, with_template=with_template))
    forms.refuse(path)  # the other problems of such a file are advice that would lead to a part of it
    problems.refuse(path)
    return found


def _conversation(where: str, value: dict[str, Any], data: Data, kind: str, *, with_template: bool) -> Conversation:
    """A line that has no problem, as messages."""
    if kind == TURNS:
        read, messages = {data.messages_key}, tuple(value[data.messages_key])
    else:
        read = {data.prompt_key, data.response_key}
        prompt, response = value[data.prompt_key], value[data.response_key]
        messages = {"role": USER, "content": prompt}, {"role": ASSISTANT, "content": response}
    read |= {TOOLS} if with_template else set()
    unused = tuple(key for key, it in value.items() if key not in read and it not in (None, "", [], {}))
    return Conversation(where, messages, tools_of(value) if with_template else None, unused)


def first_kind(path: Path, data: Data, *, with_template: bool) -> str | None:
    """TURNS or PAIR: the kind of the first line; None: it cannot be read. Only this line is read."""
    try:
        with open_regular(path) as file:
            value = json.loads(next((line for line in unpacking(path, file) if line.strip()), b""))
    except (OSError, *BAD_ARCHIVE, ValueError, RecursionError):
        return None
    return _kind(value, data, with_template=with_template) if isinstance(value, dict) else None


def json_objects(path: Path, problems: Problems) -> Iterator[tuple[str, dict[str, Any]]]:
    """The place and the JSON object of each line; any other line is added to `problems`."""
    for number, line in enumerate(read_unpacked(path)[1].splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            problems.add(where, f"not JSON: {json_problem(error)}")
            continue
        if isinstance(value, dict):
            yield where, value
        else:
            problems.add(where, f"a JSON object is needed, found {type(value).__name__}")


def _kind(value: dict[str, Any], data: Data, *, with_template: bool) -> str:
    has_pair = data.prompt_key in value and data.response_key in value
    return TURNS if data.messages_key in value and (with_template or not has_pair) else PAIR


def _wrong(value: dict[str, Any], data: Data, kind: str, *, with_template: bool) -> Iterator[str]:
    """Every reason why a line is not of its kind."""
    yield from _wrong_messages(value, data) if kind == TURNS else _wrong_pair(value, data)
    if with_template:
        yield from wrong_tools(tools_of(value))


def _wrong_pair(value: dict[str, Any], data: Data) -> Iterator[str]:
    """The first reason why a line is not a prompt with a response."""
    for key in (data.prompt_key, data.response_key):
        if not isinstance(value.get(key), str):
            there = ", ".join(map(str, value)) or "nothing"
            found = f'"{key}" is {type(value[key]).__name__}, not text' if key in value else f'no text under "{key}"'
            yield f"{found} (it has: {there}); set data.prompt_key and data.response_key, or data.messages_key"
            return
        if half_a_character(value[key]):
            yield f'"{key}" {HALF}'
            return
    if not value[data.response_key]:
        yield "the response is empty"


def _wrong_messages(value: dict[str, Any], data: Data) -> Iterator[str]:
    """Every reason why a line is not a conversation."""
    messages = value[data.messages_key]
    if not isinstance(messages, list):
        yield f'"{data.messages_key}": a list of messages is needed, found {type(messages).__name__}'
    elif not messages:
        yield f'"{data.messages_key}": the list is empty'
    else:
        wrong = [f"message {number}: {why}" for number, item in enumerate(messages, 1) for why in wrong_message(item)]
        yield from wrong
        if not wrong and not any(is_learned(message) for message in messages):
            spoken = any(message["role"] == ASSISTANT for message in messages)
            why = "every message" if spoken else "no message"
            why += f' of the role "{ASSISTANT}"' + " has weight 0" * spoken
            yield f"{why}: there is nothing to learn from"
