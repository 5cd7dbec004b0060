"""In: a conversation, a chat template. Out: the parts of the conversation that the template does not write.
Does not check a message (messages.py does). A part is lost if the text without it is the same."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from codescent.base.errors import UserError
from codescent.tasks.conversations.chat_template import ChatTemplate, Tools
from codescent.tasks.conversations.conversations import TOOLS, Conversation
from codescent.tasks.conversations.messages import ASSISTANT, SPEECH, WEIGHT, Message, quoted, words_of

OWN = ("role", "content", WEIGHT)
EMPTY: tuple[Any, ...] = (None, "", [], {})
"""Values that say nothing."""
OTHER = "\u00d7"
"""Put after a text, to see whether the template writes this text."""


def lost_parts(conversation: Conversation, template: ChatTemplate) -> list[str]:
    """What the template does not write, each part once, in words.
    Raises UserError: the template refuses the conversation, or writes nothing of a message of the assistant.
    """
    return list(dict.fromkeys(_Written(conversation, template).lost()))


@dataclass(frozen=True)
class _Written:
    """A conversation as a template writes it."""

    conversation: Conversation
    template: ChatTemplate

    def lost(self) -> Iterator[str]:
        messages, tools = self.conversation.messages, self.conversation.tools
        text = self._text()
        if tools and self._is_same(text, messages, None):
            yield f'"{TOOLS}"'
        marked = self._marked()
        for number, message in enumerate(messages):
            role = message["role"]
            if role != ASSISTANT and message.get(WEIGHT):  # such words have no losses, whatever the weight says
                yield _named(role, WEIGHT)
            for key in (key for key, it in message.items() if key not in OWN and it not in EMPTY):
                if self._is_same(text, _replaced(messages, number, _without(message, key)), tools):
                    yield _named(role, key)
            for part in _parts(message):
                other = _replaced(messages, number, _changed(message, part, OTHER))
                if _mark(number, part) not in marked and self._is_same(text, other, tools):
                    yield _named(role, "content")
            self._refuse_silent(text, number, message)

    def _text(self) -> str:
        messages, tools = self.conversation.messages, self.conversation.tools
        try:
            return self.template.render(messages, tools)
        except UserError as error:
            joined = [it | {"content": "".join(words_of(it))} if _has_parts(it) else it for it in messages]
            if any(map(_has_parts, messages)) and self._is_rendered(joined, tools):
                raise UserError(
                    f"{self.template.name}: it does not take a content that is a list of parts ({error}); write the "
                    "content as one text"
                ) from error
            raise

    def _marked(self) -> str:
        """The text with a mark after each part of a content; "" if the template refuses that."""
        messages = list(self.conversation.messages)
        for number, message in enumerate(messages):
            for part in _parts(message):
                if _says(message, part) is not None:
                    messages[number] = _changed(messages[number], part, _mark(number, part))
        try:
            return self.template.render(messages, self.conversation.tools)
        except UserError:
            return ""

    def _refuse_silent(self, text: str, number: int, message: Message) -> None:
        """Raise UserError: a message of the assistant has no words, and the template does not write what it has."""
        keys = [key for key in SPEECH if message.get(key)]
        if message["role"] != ASSISTANT or any(words_of(message)) or not keys:
            return
        bare = {key: value for key, value in message.items() if key not in keys}
        if self._is_same(text, _replaced(self.conversation.messages, number, bare), self.conversation.tools):
            raise UserError(
                f"message {number + 1}: it has {', '.join(map(json.dumps, keys))} and no words, and "
                f"{self.template.name} does not write that; take a template that does, or leave such lines out"
            )

    def _is_rendered(self, messages: Sequence[Message], tools: Tools) -> bool:
        try:
            self.template.render(messages, tools)
        except UserError:
            return False
        return True

    def _is_same(self, text: str, messages: Sequence[Message], tools: Tools) -> bool:
        try:
            return self.template.render(messages, tools) == text
        except UserError:  # the part is read
            return False


def _named(role: str, key: str) -> str:
    return f'{quoted(key)} of the role "{role}"'


def _without(message: Message, key: str) -> Message:
    return {name: value for name, value in message.items() if name != key}


def _replaced(messages: Sequence[Message], number: int, message: Message) -> list[Message]:
    return [*messages[:number], message, *messages[number + 1 :]]


def _has_parts(message: Message) -> bool:
    return isinstance(message.get("content"), list)


def _mark(number: int, part: int) -> str:
    return f"{OTHER}{number}.{part}{OTHER}"


def _says(message: Message, part: int) -> str | None:
    """The text of a part of a content; a content that is a text is one part. None: it has no text."""
    content = message["content"]
    text = content if isinstance(content, str) else content[part].get("text")
    return text if isinstance(text, str) else None


def _parts(message: Message) -> Iterator[int]:
    """The numbers of the parts of a content that are not empty."""
    content = message.get("content")
    for part in range(len(content) if isinstance(content, list) else isinstance(content, str)):
        if (text := _says(message, part)) is None or text.strip():
            yield part


def _changed(message: Message, part: int, more: str) -> Message:
    """The message with more text in a part of its content. A part without a text is left out."""
    content, text = message["content"], _says(message, part)
    if isinstance(content, str):
        return {**message, "content": content + more}
    other = [] if text is None else [{**content[part], "text": text + more}]
    return {**message, "content": [*content[:part], *other, *content[part + 1 :]]}
