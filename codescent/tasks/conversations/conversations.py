"""In: a file of JSON lines. Out: its conversations, one per line, checked; a prompt and a response become two messages.
Does not render a conversation as text (chat_template.py and dataset.py do)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from codescent.base.errors import UserError
from codescent.base.reading import open_regular
from codescent.data.text.sources import BAD_ARCHIVE, read_unpacked, unpacking

if TYPE_CHECKING:
    from codescent.config.sections import Data

USER, ASSISTANT = "user", "assistant"
ROLES = ("system", USER, ASSISTANT)
MOST_PROBLEMS = 20
TURNS, PAIR = "messages", "a prompt and a response"
HALF = "holds half of a surrogate pair, which is no character"
_SURROGATE = re.compile("[\ud800-\udfff]")

Message = dict[str, Any]
"""A dict with "role", "content", and any other keys that a template may read."""


@dataclass(frozen=True)
class Conversation:
    """The messages of a line, and the place of the line: "FILE:LINE"."""

    where: str
    messages: tuple[Message, ...]


def half_a_character(value: Any) -> bool:
    """Whether a text in a JSON value, keys included, has half of a surrogate pair."""
    return any(_SURROGATE.search(text) for text in texts_of(value))


def texts_of(value: Any) -> Iterator[str]:
    """Every text in a JSON value, keys included, at any depth."""
    left = [value]
    while left:
        match left.pop():
            case str() as text:
                yield text
            case list() as items:
                left += items
            case dict() as fields:
                left += [*fields, *fields.values()]


def refuse(path: Path, problems: list[str]) -> None:
    """Raise UserError if there are problems: the first ones, and the number of further problems."""
    more = len(problems) - MOST_PROBLEMS
    if problems:
        raise UserError(*problems[:MOST_PROBLEMS], *([f"{path}: {more} more problems"] if more > 0 else []))


def read_conversations(path: Path, data: Data, *, with_template: bool) -> list[Conversation]:
    """The conversations of a file of JSON lines. All lines must have one kind: messages, or prompt and response.

    A line with both is read as messages with a chat template, and as prompt and response without one. Keys of [data]
    give the names of a line's keys. Lines of white space are skipped.
    Raises UserError: lines that are not conversations, or not of the first line's kind; messages without a template.
    """
    problems: list[str] = []
    found = []
    first_kind = first_where = ""
    for where, value in _objects(path, problems):
        kind = _kind(value, data, with_template=with_template)
        if not first_kind:
            first_kind, first_where = kind, where
        if kind == TURNS and not with_template:
            raise UserError(
                f'{where}: "{data.messages_key}": data.chat_template is needed to write messages as text: give the '
                "folder of the model that is tuned, its tokenizer_config.json or its chat_template.jinja"
            )
        if kind != first_kind:
            problems.append(
                f"{where}: {kind}, but the first line ({first_where}) has {first_kind}: all lines must have one kind"
            )
        elif wrong := list(_wrong_messages(value, data) if kind == TURNS else _wrong_pair(value, data)):
            problems += [f"{where}: {problem}" for problem in wrong]
        elif kind == TURNS:
            found.append(Conversation(where, tuple(value[data.messages_key])))
        else:
            prompt, response = value[data.prompt_key], value[data.response_key]
            pair = {"role": USER, "content": prompt}, {"role": ASSISTANT, "content": response}
            found.append(Conversation(where, pair))
    refuse(path, problems)
    return found


def first_kind(path: Path, data: Data, *, with_template: bool) -> str | None:
    """TURNS or PAIR: the kind of the first line; None: it cannot be read. Only this line is read."""
    try:
        with open_regular(path) as file:
            value = json.loads(next((line for line in unpacking(path, file) if line.strip()), b""))
    except (OSError, *BAD_ARCHIVE, ValueError, RecursionError):
        return None
    return _kind(value, data, with_template=with_template) if isinstance(value, dict) else None


def _objects(path: Path, problems: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The place and the JSON object of each line; any other line is added to `problems`."""
    for number, line in enumerate(read_unpacked(path)[1].splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            problems.append(f"{where}: not JSON: {error}")
            continue
        if isinstance(value, dict):
            yield where, value
        else:
            problems.append(f"{where}: a JSON object is needed, found {type(value).__name__}")


def _kind(value: dict[str, Any], data: Data, *, with_template: bool) -> str:
    has_pair = data.prompt_key in value and data.response_key in value
    return TURNS if data.messages_key in value and (with_template or not has_pair) else PAIR


def _wrong_pair(value: dict[str, Any], data: Data) -> Iterator[str]:
    """The first reason why a line is not a prompt with a response."""
    for key in (data.prompt_key, data.response_key):
        if not isinstance(value.get(key), str):
            there = ", ".join(map(str, value)) or "nothing"
            yield (
                f'no text under "{key}" (it has: {there}); set data.prompt_key and data.response_key, '
                "or data.messages_key"
            )
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
        wrong = [f"message {number}: {why}" for number, item in enumerate(messages, 1) for why in _wrong_message(item)]
        yield from wrong
        if not wrong and not any(message["role"] == ASSISTANT for message in messages):
            yield f'no message of the role "{ASSISTANT}": there is nothing to learn from'


def _wrong_message(message: Any) -> Iterator[str]:
    """The first reason why `message` is not a message."""
    if not isinstance(message, dict):
        yield f"an object with a role and a content is needed, found {type(message).__name__}"
        return
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        found = f"the role {json.dumps(role)}" if "role" in message else "no role"
        yield f"{found}: it must be one of {', '.join(ROLES)}"
    elif not isinstance(content, str):
        found = f"is {type(content).__name__}, not text" if "content" in message else "is missing"
        yield f'the "content" of the role "{role}" {found}'
    elif halves := [key for key, value in message.items() if half_a_character([key, value])]:
        yield f"its {', '.join(map(json.dumps, halves))} {HALF}"
    elif role == ASSISTANT and not content:
        yield "the content of the assistant is empty"
