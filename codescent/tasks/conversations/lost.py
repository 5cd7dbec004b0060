"""In: a conversation, a chat template. Out: the parts of the conversation that the template does not write.
Does not check a message (messages.py does). A part is lost if the text without it is the same."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from codescent.base.errors import UserError
from codescent.tasks.conversations.chat_template import ChatTemplate
from codescent.tasks.conversations.conversations import TOOLS, Conversation
from codescent.tasks.conversations.messages import ASSISTANT, SPEECH, WEIGHT, Message, words_of

OWN = ("role", "content", WEIGHT)
OTHER = "\u00d7"
"""Put after a text to see whether another text makes a difference."""


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
        text = self.template.render(messages, tools)
        if tools and self._is_same(text, messages, None):
            yield f'"{TOOLS}"'
        for role, key in dict.fromkeys((it["role"], key) for it in messages for key in it if key not in OWN):
            if self._is_same(text, [_without(it, key) if it["role"] == role else it for it in messages], tools):
                yield _named(role, key)
        for number, message in enumerate(messages):
            role = message["role"]
            if role != ASSISTANT and message.get(WEIGHT):  # such words have no losses, whatever the weight says
                yield _named(role, WEIGHT)
            if any(self._is_same(text, _replaced(messages, number, it), tools) for it in _changed(message, text)):
                yield _named(role, "content")
            self._refuse_silent(text, number, message)

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

    def _is_same(self, text: str, messages: Sequence[Message], tools: list[dict[str, Any]] | None) -> bool:
        try:
            return self.template.render(messages, tools) == text
        except UserError:  # the part is read
            return False


def _named(role: str, key: str) -> str:
    return f'{json.dumps(key)} of the role "{role}"'


def _without(message: Message, key: str) -> Message:
    return {name: value for name, value in message.items() if name != key}


def _replaced(messages: Sequence[Message], number: int, message: Message) -> list[Message]:
    return [*messages[:number], message, *messages[number + 1 :]]


def _changed(message: Message, text: str) -> Iterator[Message]:
    """The message with another content, for each part of its content that is not in `text` as it stands."""
    content = message.get("content")
    if isinstance(content, str) and content.strip() and content.strip() not in text:
        yield {**message, "content": content + OTHER}
    if isinstance(content, list):
        for number, part in enumerate(content):
            words = part.get("text")
            if not isinstance(words, str) or (words.strip() and words.strip() not in text):
                yield {**message, "content": [*content[:number], *content[number + 1 :]]}
