"""In: a chat template, a conversation. Out: its text and tokens as in `transformers`; ranges of the assistant's tokens.
Does not find the template (chat_files.py does), compile or render it (another process does: chat_renderer.py)."""

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
from codescent.data.tokenizers.bpe import LibraryTokenizer
from codescent.data.tokenizers.tokenizer import SEPARATOR_TEXT, ByteTokenizer, Tokenizer
from codescent.data.tokenizers.wordpiece import Pieces
from codescent.tasks.conversations.chat_files import SPECIAL, SPECIAL_MAP, TOKENIZER_CONFIG, ChatFiles
from codescent.tasks.conversations.chat_jinja import BEGIN, END, MARKED, TAGS
from codescent.tasks.conversations.chat_renderer import ask as ask_renderer
from codescent.tasks.conversations.messages import (
    ASSISTANT,
    HALF,
    REASONING,
    USER,
    Message,
    half_a_character,
    is_learned,
    texts_of,
)

Tools = Sequence[dict[str, Any]] | None
"""The tools of a conversation; None: it has none."""
Spans = list[tuple[int, int]]
"""Ranges [begin, end) of characters or tokens."""
_TAG = f"put {TAGS} around the assistant's words in a copy of the template"
_PROBE = "words"
_SHORTEST: tuple[Message, ...] = ({"role": USER, "content": "?"}, {"role": ASSISTANT, "content": "."})


class ChatTemplate:
    """A chat template, compiled: it renders as `transformers`' `apply_chat_template(tokenize=False)`.

    Its date is fixed, so that two renderings of a conversation are equal.

    Attributes:
        special: the special tokens that the template reads and the model has: name -> text.
        reads_eos: whether the template reads eos_token.
        files: the template and its special tokens; with the date if the template reads it.

    Raises:
        UserError: it is not Jinja, or it reads special tokens that no file defines.
    """

    def __init__(self, files: ChatFiles) -> None:
        self.name = files.name
        facts = ask_renderer(files, None)
        variables = facts["variables"]
        self._tagged = MARKED in variables
        self.reads_eos = "eos_token" in variables
        if unknown := [name for name in SPECIAL if name in variables and name not in files.special]:
            raise UserError(
                f"data.chat_template: {files.name}: it reads {', '.join(unknown)}, but neither {TOKENIZER_CONFIG} "
                f"nor {SPECIAL_MAP} next to it defines that; add it there (null: the model has none), or write the "
                "token into the template"
            )
        named = {name: text for name, text in files.special.items() if text is not None}
        self._variables = {"documents": None, **named}
        self.special = {name: text for name, text in named.items() if name in variables}
        self.files = replace(files, day=facts["day"])
        self._for_tools = self
        if files.tool_use is not None:
            self._for_tools = other = ChatTemplate(files.for_tools())
            self.special |= other.special
            self.reads_eos |= other.reads_eos
            self.files = replace(self.files, day=facts["day"] or other.files.day)

    def render(
        self, messages: Sequence[Message], tools: Tools = None, *, ask: bool = False, marked: bool = False
    ) -> str:
        """The text of a conversation, or of its first messages.

        `ask` appends the beginning of the assistant's next turn (`add_generation_prompt`). `marked` puts BEGIN and END
        around the text that the template tags as the assistant's. Raises UserError: the template raises an error.
        """
        if tools is not None and self._for_tools is not self:
            return self._for_tools.render(messages, tools, ask=ask, marked=marked)
        try:
            plain, described = _plain(messages), deepcopy(tools)
        except RecursionError as error:
            raise UserError("a message or a tool is nested too deeply") from error
        variables = {"messages": plain, "tools": described, "add_generation_prompt": ask, **self._variables}
        text: str = ask_renderer(self.files, variables | ({MARKED: True} if marked else {}))["text"]
        if half_a_character(text):
            raise UserError(f"{self.name}: its text {HALF}")
        return text

    def write(self, messages: Sequence[Message], controls: tuple[str, ...], tools: Tools = None) -> tuple[str, Spans]:
        """The text of a conversation, and the characters [begin, end) of each turn of the assistant that is learned.

        A template with tags marks the turns. Without tags, a turn is the text after its generation prompt: its words
        and its end. White space at the end, after one of the `controls` (texts of control tokens), is left out.
        Raises UserError: the template refuses the conversation, or the assistant's turns cannot be found in its text.
        """
        if tools is not None and self._for_tools is not self:
            return self._for_tools.write(messages, controls, tools)
        text = self.render(messages, tools)
        if self._tagged:
            return text, self._tagged_turns(messages, tools, text)
        turns = []
        for number, message in enumerate(messages):
            if is_learned(message):
                begin, end = self._turn(messages, tools, number, text)
                stripped = text[begin:end].rstrip()
                turns.append((begin, begin + len(stripped) if stripped.endswith(controls) else end))
        return text, turns

    def _tagged_turns(self, messages: Sequence[Message], tools: Tools, text: str) -> Spans:
        if any(mark in it for it in texts_of(list(messages)) for mark in (BEGIN, END)):
            raise UserError(f"the conversation has {BEGIN!r} or {END!r}, which are reserved to mark the text in {TAGS}")
        found = list(_unmarked(self.render(messages, tools, marked=True), text, self.name))
        if not found:
            raise UserError(f"{self.name}: for this conversation it writes no text in {TAGS}")
        learned = [is_learned(message) for message in messages if message["role"] == ASSISTANT]
        if all(learned):
            return found
        if len(found) != len(learned):
            raise UserError(
                f"{self.name}: it writes {len(found)} texts in {TAGS} for {len(learned)} messages of the assistant, so "
                "the messages of weight 0 cannot be found"
            )
        return [span for span, wanted in zip(found, learned, strict=True) if wanted]

    def _turn(self, messages: Sequence[Message], tools: Tools, number: int, text: str) -> tuple[int, int]:
        """The characters [begin, end) of one turn of the assistant, after its generation prompt."""
        turn = f"message {number + 1}, the assistant's"
        try:
            earlier = messages[:number]
            before, prompted = self.render(earlier, tools), self.render(earlier, tools, ask=True)
            so_far = text if number + 1 == len(messages) else self.render(messages[: number + 1], tools)
        except UserError as error:
            raise UserError(
                f"{turn}: to find where it begins, the messages before it are rendered alone; this fails: "
                f"{error}: {_TAG}"
            ) from error
        if text.startswith(so_far) and not so_far.startswith(prompted):
            raise UserError(
                f"{turn}: {self.name} has the generation prompt {prompted.removeprefix(before)!r}, but the turn does "
                f"not begin with that, so the turn cannot be found in the text: {_TAG}"
            )
        if not text.startswith(so_far):
            raise UserError(
                f"{turn}: {self.name} renders the messages up to it differently when others follow, so the turn cannot "
                f"be found in the text: {_TAG}"
            )
        if prompted == before and not self._works_unprompted(messages[: number + 1]):
            raise UserError(
                f"{turn}: {self.name} ignores add_generation_prompt, so the turn's words cannot be separated from the "
                f"beginning of the turn: {_TAG}"
            )
        return len(prompted), len(so_far)

    def _works_unprompted(self, messages: Sequence[Message]) -> bool:
        """Whether a template that ignores add_generation_prompt can be used without tags.

        It can if the last turn begins with its words and does not end with the beginning of the next turn. A turn with
        something else than words is replaced by a turn of words. There are no tools: some templates write them before
        the last message of the user, which is another one here.
        """
        *earlier, last = messages
        words = last.get("content")
        if not isinstance(words, str) or last.get("tool_calls"):
            words = _PROBE
        turn = {"role": ASSISTANT, "content": words}
        try:
            before, so_far = self.render(earlier), self.render([*earlier, turn])
            continued = self.render([*earlier, turn, {"role": USER, "content": "?"}])
        except UserError:
            return False
        begins = so_far.removeprefix(before).lstrip().startswith(words.strip())
        return so_far.startswith(before) and begins and continued.startswith(so_far)


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
    """The ranges in `text` that are between BEGIN and END in `marked`, which is the same text with these marks."""
    pieces, marks = re.split(f"[{BEGIN}{END}]", marked), re.findall(f"[{BEGIN}{END}]", marked)
    if "".join(pieces) != text:
        raise UserError(f"{name}: it changes the text of {TAGS} afterwards, so that the text cannot be found")
    if marks != [BEGIN, END] * (len(marks) // 2):
        raise UserError(f"{name}: {TAGS} inside {TAGS}, or without its end: remove the inner ones")
    at = 0
    for number, piece in enumerate(pieces):
        if number % 2 and piece:
            yield at, at + len(piece)
        at += len(piece)


class ChatTokens:
    """Encodes conversations with a chat template and a tokenizer.

    The text of a conversation is encoded as a whole. The tokenizer adds no tokens of its own, such as a first token.
    Text that spells a control token becomes that token, also inside messages, as in `transformers`'
    `apply_chat_template(tokenize=True)`.
    Raises UserError: the tokenizer lacks a special token that the template reads, or is a character tokenizer.
    """

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer) -> None:
        self.template = template
        if isinstance(tokenizer, LibraryTokenizer):
            self._pieces: _LibraryPieces | _BytePieces = _LibraryPieces(tokenizer, list(template.special.values()))
        elif isinstance(tokenizer, ByteTokenizer) and tokenizer.separator is not None:
            self._pieces = _BytePieces(tokenizer.separator)
        else:
            raise UserError(
                "data.chat_template: data.tokenizer is a character tokenizer, which has no control tokens; take the "
                "tokenizer.json of the model that is tuned"
            )
        self._controls = tuple(self._pieces.controls)
        missing = [f"{name} {text!r}" for name, text in template.special.items() if text not in self._controls]
        if missing:
            raise UserError(
                f"data.chat_template: {template.name}: its {', '.join(missing)} is not a token of data.tokenizer; "
                "take template and tokenizer.json from one folder"
            )

    def encode(self, messages: Sequence[Message], tools: Tools = None) -> tuple[Pieces, Spans]:
        """Tokens of a conversation, and the ranges [begin, end) of tokens that are the assistant's, in order.

        A token that is partly the assistant's is included, except a control token that begins before the turn. The
        first token is never included, because it is not predicted. Raises UserError: see `ChatTemplate.write`; there is
        no such token.
        """
        text, turns = self.template.write(messages, self._controls, tools)
        pieces = self._pieces.encode(text)
        return pieces, self._wanted(pieces, turns)

    def _wanted(self, pieces: Pieces, turns: Spans) -> Spans:
        """The ranges of tokens for ranges of characters: see `encode`."""
        begins, ends = pieces.characters[:, 0], np.maximum(pieces.characters[:, 1], pieces.characters[:, 0] + 1)
        is_control = np.isin(pieces.ids, list(self._pieces.controls.values()))
        wanted = np.zeros(len(pieces.ids) + 2, np.int8)  # and a 0 on either side
        for begin, end in turns:
            wanted[1:-1] |= (begins < end) & (ends > begin) & ((begins >= begin) | ~is_control)
        wanted[1:2] = 0
        edges = np.flatnonzero(np.diff(wanted))
        if not len(edges):
            raise UserError(f"{self.template.name}: no token of its text is the assistant's")
        return [(int(begin), int(end)) for begin, end in edges.reshape(-1, 2)]

    def encode_prompt(self, prompt: str) -> tuple[str, list[int]]:
        """The text and tokens of a user's message and the generation prompt. Raises UserError: see `render`."""
        text = self.template.render([{"role": USER, "content": prompt}], ask=True)
        return text, self._pieces.encode(text).ids.tolist()

    def encode_turns(self, messages: Sequence[Message], tools: Tools = None) -> list[int]:
        """The tokens of a conversation and of the generation prompt. Raises UserError: see `render`."""
        ids: list[int] = self._pieces.encode(self.template.render(messages, tools, ask=True)).ids.tolist()
        return ids

    def end(self) -> int | None:
        """The control token that ends a turn of the assistant: the first one after its words; None: there is none.
        Raises UserError: the template raises an error for the shortest conversation.
        """
        text, turns = self.template.write(_SHORTEST, self._controls)
        pieces = self._pieces.encode(text)
        begin, end = self._wanted(pieces, turns)[-1]
        found, controls = None, set(self._pieces.controls.values())
        for number in range(end - 1, begin - 1, -1):
            first, last = pieces.characters[number]
            if text[first:last].strip():  # a control token of white space does not end a turn
                if int(pieces.ids[number]) not in controls:
                    break
                found = int(pieces.ids[number])
        return found

    def text_of(self, control: int) -> str:
        """The text of a control token."""
        return next(text for text, number in self._pieces.controls.items() if number == control)


class _LibraryPieces:
    """A tokenizer of the tokenizers library. Text that spells a control token is encoded as that token.
    The separator and each of the `special` texts in the vocabulary become control tokens.
    """

    def __init__(self, tokenizer: LibraryTokenizer, special: list[str]) -> None:
        fields = json.loads(tokenizer.library_text)
        # A post-processor would add tokens, and strip white space from the characters of tokens.
        fields["post_processor"] = None
        self._inner = library.Tokenizer.from_str(json.dumps(fields))
        known = self._inner.get_vocab(with_added_tokens=True)
        separators = [text for text, number in known.items() if number == tokenizer.separator]
        controls = set(self._added())
        self._inner.add_special_tokens(sorted({*separators, *special} & set(known) - controls))
        self.controls = self._added()

    def _added(self) -> dict[str, int]:
        return {token.content: number for number, token in self._inner.get_added_tokens_decoder().items()}

    def encode(self, text: str) -> Pieces:
        """Tokens of a text, and the characters of each token."""
        found = self._inner.encode(text, add_special_tokens=False)
        return Pieces(np.array(found.ids, np.int64), np.array(found.offsets, np.int32).reshape(-1, 2))


class _BytePieces:
    """The bytes of UTF-8. Text that spells the document separator is encoded as the token `end`."""

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
