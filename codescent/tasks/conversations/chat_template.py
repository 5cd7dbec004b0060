"""In: a chat template, a conversation. Out: its text and tokens as `transformers` makes them; what the assistant says.
Does not find the template (chat_files.py does) and does not compile it (chat_jinja.py does)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers as library

from codescent.base.errors import UserError
from codescent.data.tokenizers.bpe import SEPARATORS, LibraryTokenizer
from codescent.data.tokenizers.tokenizer import SEPARATOR_TEXT, ByteTokenizer, Tokenizer
from codescent.data.tokenizers.wordpiece import Pieces
from codescent.tasks.conversations.chat_files import SPECIAL, SPECIAL_MAP, TOKENIZER_CONFIG, ChatFiles
from codescent.tasks.conversations.chat_jinja import BEGIN, END, MARKED, TAGS, compiled, written
from codescent.tasks.conversations.conversations import ASSISTANT, HALF, USER, Message, half_a_character, texts_of

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names that messages have for their reasoning; most templates read the first, gpt-oss the second."""
Spans = list[tuple[int, int]]
"""Pieces [begin, end)."""
_TAG = f"put {TAGS} around the assistant's words in a copy of the template"
_SHORTEST: tuple[Message, ...] = ({"role": USER, "content": "?"}, {"role": ASSISTANT, "content": "."})


class ChatTemplate:
    """A chat template, compiled: it renders as `transformers`' `apply_chat_template(tokenize=False)`.

    Its day is fixed, so that two renderings of a conversation are the same.

    Attributes:
        special: the special tokens that the template reads and the model has, by name.
        asks_for_end: whether it reads the eos_token.
        files: the template and its special tokens; with its day if its texts depend on that.

    Raises:
        UserError: it is not Jinja, or it reads special tokens that no file gives.
    """

    def __init__(self, files: ChatFiles) -> None:
        self.name = files.name
        self._template, asked, day = compiled(files)
        self._tagged = MARKED in asked
        self.asks_for_end = "eos_token" in asked
        if unknown := [name for name in SPECIAL if name in asked and name not in files.special]:
            raise UserError(
                f"data.chat_template: {files.name}: it asks for {', '.join(unknown)}, and neither {TOKENIZER_CONFIG} "
                f"nor {SPECIAL_MAP} beside it tells that; add it there (null: the model has none), or write the token "
                "itself"
            )
        named = {name: text for name, text in files.special.items() if text is not None}
        self._variables = {"tools": None, "documents": None, **named}
        self.special = {name: text for name, text in named.items() if name in asked}
        self.files = replace(files, day=None if day is None else day.isoformat())

    def render(self, messages: Sequence[Message], *, ask: bool = False, marked: bool = False) -> str:
        """The text of the first messages of a conversation, or of all.

        With `ask` it has the beginning of the assistant's next turn (`add_generation_prompt`); `marked` puts BEGIN and
        END around what the template tags as the assistant's. Raises UserError: the template's own refusal.
        """
        try:
            plain = _plain(messages)
        except RecursionError as error:
            raise UserError("what is in a message is nested too deep") from error
        variables = {"messages": plain, "add_generation_prompt": ask, **self._variables}
        text = written(self._template, self.name, variables | ({MARKED: True} if marked else {}))
        if half_a_character(text):
            raise UserError(f"{self.name}: what it writes {HALF}")
        return text

    def write(self, messages: Sequence[Message], controls: tuple[str, ...]) -> tuple[str, Spans]:
        """The text of a conversation, and the characters of each turn that the assistant says.

        These are the ones that the template tags. Without tags they are each turn's text behind the generation prompt:
        its words and what ends it. White space behind one of the `controls`, texts of control tokens, does not count.
        Raises UserError: the template refuses the conversation, or the assistant's turns cannot be found in its text.
        """
        text = self.render(messages)
        if self._tagged:
            return text, self._tagged_turns(messages, text)
        turns = []
        for number, message in enumerate(messages):
            if message["role"] == ASSISTANT:
                begin, end = self._turn(messages, number, text)
                said = text[begin:end].rstrip()
                turns.append((begin, begin + len(said) if said.endswith(controls) else end))
        return text, turns

    def _tagged_turns(self, messages: Sequence[Message], text: str) -> Spans:
        if any(mark in it for it in texts_of(list(messages)) for mark in (BEGIN, END)):
            raise UserError(f"the conversation has {BEGIN!r} or {END!r} in it, which mark what is in {TAGS}")
        found = list(_unmarked(self.render(messages, marked=True), text, self.name))
        if not found:
            raise UserError(f"{self.name}: of this conversation it writes nothing in {TAGS}")
        return found

    def _turn(self, messages: Sequence[Message], number: int, text: str) -> tuple[int, int]:
        """The characters of one turn of the assistant, behind its generation prompt."""
        turn = f"message {number + 1}, the assistant's"
        try:
            before, asked = self.render(messages[:number]), self.render(messages[:number], ask=True)
            told = text if number + 1 == len(messages) else self.render(messages[: number + 1])
        except UserError as error:
            raise UserError(
                f"{turn}: where it begins and ends is found by writing what stands before it alone: {error}: {_TAG}"
            ) from error
        if text.startswith(told) and not told.startswith(asked):
            raise UserError(
                f"{turn}: {self.name} asks for it with {asked.removeprefix(before)!r}, and writes it without that, so "
                f"that it cannot be told from the rest: {_TAG}"
            )
        if not text.startswith(told):
            raise UserError(
                f"{turn}: {self.name} writes the messages up to it otherwise when others follow, so that it cannot be "
                f"told from the rest: {_TAG}"
            )
        if asked == before and not self._needs_no_asking(messages[: number + 1], told, told[len(asked) :]):
            raise UserError(
                f"{turn}: {self.name} does not heed add_generation_prompt, so that the turn's words cannot be told "
                f"from the beginning of one: {_TAG}"
            )
        return len(asked), len(told)

    def _needs_no_asking(self, messages: Sequence[Message], told: str, turn: str) -> bool:
        """Whether the last turn begins with its words and does not end with the beginning of the next turn: only then
        can a template that ignores add_generation_prompt be used without tags."""
        goes_on = self.render([*messages, {"role": USER, "content": "?"}])
        return turn.lstrip().startswith(messages[-1]["content"].strip()) and goes_on.startswith(told)


def _plain(messages: Sequence[Message]) -> list[Message]:
    """Copies of messages as `transformers` passes them; a template can change only the copies."""
    found = []
    for message in messages:
        plain = {key: value for key, value in message.items() if value is not None}
        thought = next((plain[key] for key in REASONING if key in plain), None)
        aliases = ({}, {}) if thought is None else ({"thinking": thought}, {"reasoning_content": thought})
        found.append(deepcopy({**aliases[0], **plain, **aliases[1]}))
    return found


def _unmarked(marked: str, text: str, name: str) -> Iterator[tuple[int, int]]:
    """Where the parts between marks are in the text without marks."""
    pieces, marks = re.split(f"[{BEGIN}{END}]", marked), re.findall(f"[{BEGIN}{END}]", marked)
    if "".join(pieces) != text:
        raise UserError(f"{name}: what it writes in {TAGS} it goes on to change, so that its place is not to be found")
    if marks != [BEGIN, END] * (len(marks) // 2):
        raise UserError(f"{name}: {TAGS} within {TAGS}, or cut in two: take the inner ones away")
    at = 0
    for number, piece in enumerate(pieces):
        if number % 2 and piece:
            yield at, at + len(piece)
        at += len(piece)


class ChatTokens:
    """Conversations to tokens, by a template and a tokenizer.

    The text of a conversation is encoded as a whole, without what the tokenizer itself would add, such as a beginning.
    Wherever the text spells a control token it becomes that token, in messages too, as by `transformers`'
    `apply_chat_template(tokenize=True)`.
    Raises UserError: the tokenizer lacks a special token that the template reads, or is one of characters.
    """

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer) -> None:
        self.template = template
        if isinstance(tokenizer, LibraryTokenizer):
            self._pieces: _LibraryPieces | _BytePieces = _LibraryPieces(tokenizer, list(template.special.values()))
        elif isinstance(tokenizer, ByteTokenizer) and tokenizer.separator is not None:
            self._pieces = _BytePieces(tokenizer.separator)
        else:
            raise UserError(
                "data.chat_template: data.tokenizer is one of characters, which no template is made for; take the "
                "tokenizer.json of the model that is tuned"
            )
        self._controls = tuple(self._pieces.controls)
        missing = [f"{name} {text!r}" for name, text in template.special.items() if text not in self._controls]
        if missing:
            raise UserError(
                f"data.chat_template: {template.name}: its {', '.join(missing)} is no token of data.tokenizer; take "
                "template and tokenizer.json from one folder"
            )

    def encode(self, messages: Sequence[Message]) -> tuple[Pieces, Spans]:
        """Tokens of a conversation, and which of these, [begin, end), the assistant says, turn by turn.

        A token that is partly the assistant's is wanted, except a control token that begins before. The first token is
        never wanted: nothing predicts it. Raises UserError: see `ChatTemplate.write`; nothing is wanted.
        """
        text, turns = self.template.write(messages, self._controls)
        pieces = self._pieces.encode(text)
        return pieces, self._wanted(pieces, turns)

    def _wanted(self, pieces: Pieces, turns: Spans) -> Spans:
        """Tokens by characters: see `encode`."""
        begins, ends = pieces.characters[:, 0], np.maximum(pieces.characters[:, 1], pieces.characters[:, 0] + 1)
        is_control = np.isin(pieces.ids, list(self._pieces.controls.values()))
        wanted = np.zeros(len(pieces.ids) + 2, np.int8)  # and one on either side that is not wanted
        for begin, end in turns:
            wanted[1:-1] |= (begins < end) & (ends > begin) & ((begins >= begin) | ~is_control)
        wanted[1:2] = 0
        edges = np.flatnonzero(np.diff(wanted))
        if not len(edges):
            raise UserError(f"{self.template.name}: no token of what it writes is the assistant's")
        return [(int(begin), int(end)) for begin, end in edges.reshape(-1, 2)]

    def ask(self, prompt: str) -> tuple[str, list[int]]:
        """The text and the tokens with which a user asks a model. Raises UserError: the template refuses it."""
        text = self.template.render([{"role": USER, "content": prompt}], ask=True)
        return text, self._pieces.encode(text).ids.tolist()

    def end(self) -> int | None:
        """The control token that ends a turn of the assistant: the first one behind its words; None: there is none.
        Raises UserError: the template refuses the shortest conversation.
        """
        text, turns = self.template.write(_SHORTEST, self._controls)
        pieces = self._pieces.encode(text)
        begin, end = self._wanted(pieces, turns)[-1]
        found, controls = None, set(self._pieces.controls.values())
        for number in range(end - 1, begin - 1, -1):
            first, last = pieces.characters[number]
            if text[first:last].strip():  # control tokens of white space end nothing
                if int(pieces.ids[number]) not in controls:
                    break
                found = int(pieces.ids[number])
        return found

    def text_of(self, control: int) -> str:
        """The text of a control token."""
        return next(text for text, number in self._pieces.controls.items() if number == control)


class _LibraryPieces:
    """A tokenizer of the library that knows control tokens, by their texts, where text spells them.
    Its separator becomes one, and so does each of the `special` texts that is in the vocabulary.
    """

    def __init__(self, tokenizer: LibraryTokenizer, special: list[str]) -> None:
        fields = json.loads(tokenizer.text)
        # It would add tokens, and take white space off the characters of tokens.
        fields["post_processor"] = None
        self._inner = library.Tokenizer.from_str(json.dumps(fields))
        known = self._inner.get_vocab(with_added_tokens=True)
        separators = [text for text in SEPARATORS if text in known and known[text] == tokenizer.separator]
        controls = set(self._added())
        self._inner.add_special_tokens(sorted({*separators, *special} & set(known) - controls))
        self.controls = self._added()

    def _added(self) -> dict[str, int]:
        return {token.content: number for number, token in self._inner.get_added_tokens_decoder().items()}

    def encode(self, text: str) -> Pieces:
        """Tokens of a text, and which characters each stands for."""
        found = self._inner.encode(text, add_special_tokens=False)
        return Pieces(np.array(found.ids, np.int64), np.array(found.offsets, np.int32).reshape(-1, 2))


class _BytePieces:
    """The bytes of UTF-8, and the token `end`, which ends a document, where a text spells it."""

    def __init__(self, end: int) -> None:
        self.controls = {SEPARATOR_TEXT: end}

    def encode(self, text: str) -> Pieces:
        """See `_LibraryPieces`."""
        ids: list[npt.NDArray[Any]] = []
        characters, at = [], 0
        for piece in re.split(f"({re.escape(SEPARATOR_TEXT)})", text):
            if piece == SEPARATOR_TEXT:
                ids.append(np.array([self.controls[piece]]))
                characters.append((at, at + len(piece)))
            else:
                ids.append(np.frombuffer(piece.encode(), np.uint8))
                for number, char in enumerate(piece, at):
                    characters += [(number, number + 1)] * len(char.encode())
            at += len(piece)
        return Pieces(np.concatenate(ids).astype(np.int64), np.array(characters, np.int32).reshape(-1, 2))
