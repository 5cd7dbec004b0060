"""In: a message of a conversation, its tools. Out: why they cannot be used; which messages have losses.
Does not know what a template does with a message (lost.py does)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

USER, ASSISTANT = "user", "assistant"
ROLES = ("system", "developer", USER, ASSISTANT, "tool", "function", "ipython")
WEIGHT = "weight"
"""Key of a message: 0 means that its words have no losses, 1 (the default) that they have."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message's reasoning; most templates read the first, gpt-oss the second."""
SPEECH = ("tool_calls", "function_call", *REASONING)
"""Keys that an assistant's message may have in place of words."""
MEDIA = ("image", "audio", "video", "file")
HALF = "holds half of a surrogate pair, which is no character"
_SURROGATE = re.compile("[\ud800-\udfff]")

Message = dict[str, Any]
"""A dict with "role", "content" (a text or a list of parts), and any other keys that a template may read."""


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


def quoted(key: str) -> str:
    """A key as JSON writes it; half of a surrogate pair, which cannot be printed, is escaped."""
    return json.dumps(key, ensure_ascii=half_a_character(key))


def is_learned(message: Message) -> bool:
    """Whether the words of a message have losses: it is the assistant's, and its weight is not 0."""
    weight = message.get(WEIGHT)
    return bool(message["role"] == ASSISTANT and (weight is None or weight))


def words_of(message: Message) -> list[str]:
    """The texts of a message's content: one, or one of each part."""
    content = message.get("content")
    if isinstance(content, list):
        return [part["text"] for part in content if isinstance(part.get("text"), str)]
    return [content] if isinstance(content, str) else []


def tools_of(line: Mapping[str, Any]) -> Any:
    """The tools of a line as a template gets them. A list may be stored as JSON text; None: the line has none."""
    tools = line.get("tools")
    if not isinstance(tools, str):
        return tools
    try:
        return json.loads(tools) if tools.strip() else None
    except (ValueError, RecursionError):
        return tools


def _is_of_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def wrong_tools(tools: Any) -> Iterator[str]:
    """Why the tools of a line cannot be used."""
    if tools is None:
        return
    if not _is_of_objects(tools):
        found = "another list" if isinstance(tools, list) else type(tools).__name__
        yield f'"tools": a list of objects, one for each tool, is needed, found {found}'
    elif half_a_character(tools):
        yield f'"tools" {HALF}'


def wrong_message(message: Any, *, needs_words: bool = True) -> Iterator[str]:
    """The first reason why `message` is not a message. `needs_words`: an answer must not be empty."""
    if not isinstance(message, dict):
        yield f"an object with a role and a content is needed, found {type(message).__name__}"
        return
    role = message.get("role")
    speaks = role == ASSISTANT and any(message.get(key) for key in SPEECH)
    if role not in ROLES:
        found = f"the role {json.dumps(role)}" if "role" in message else "no role"
        yield f"{found}: it must be one of {', '.join(ROLES)}"
    elif wrong := next(_wrong_content(role, message, speaks), None):
        yield wrong
    elif message.get(WEIGHT) not in (None, 0, 1):
        yield f"its weight is {json.dumps(message[WEIGHT])}: it must be 0 (no losses) or 1"
    elif not _is_of_objects(message.get("tool_calls") or []):
        yield 'its "tool_calls": a list of objects is needed'
    elif halves := [key for key, value in message.items() if half_a_character([key, value])]:
        yield f"its {', '.join(map(json.dumps, halves))} {HALF}"
    elif needs_words and role == ASSISTANT and not speaks and not any(words_of(message)):
        yield "the content of the assistant is empty"


def _wrong_content(role: str, message: Message, speaks: bool) -> Iterator[str]:
    content = message.get("content")
    if isinstance(content, list):
        for number, part in enumerate(content, 1):
            where = f'part {number} of the "content" of the role "{role}"'
            kind = part.get("type") if isinstance(part, dict) else None
            if not isinstance(kind, str):
                yield f"{where}: an object with a type is needed, found {type(part).__name__}"
            elif any(name in kind for name in MEDIA):
                yield f"{where}: the type is {json.dumps(kind)}; models read text only"
            elif kind == "text" and not isinstance(part.get("text"), str):
                yield f'{where}: it has no "text"'
    elif not isinstance(content, str) and not (content is None and speaks):
        found = f"is {type(content).__name__}, not text" if "content" in message else "is missing"
        yield f'the "content" of the role "{role}" {found}'
