"""In: a written conversation, a tokenizer. Out: its tokens, control tokens among them, and which of them are wanted.
Does not write the conversation as text (chat_template.py does)."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers as library

from codescent.base.errors import UserError
from codescent.data.tokenizers.bpe import SEPARATORS, LibraryTokenizer
from codescent.data.tokenizers.tokenizer import SEPARATOR_TEXT, ByteTokenizer, Tokenizer
from codescent.data.tokenizers.wordpiece import Pieces
from codescent.tasks.conversations.chat_template import ChatTemplate, Spans
from codescent.tasks.conversations.conversations import ASSISTANT, USER, Message

_SHORTEST: tuple[Message, ...] = ({"role": USER, "content": "?"}, {"role": ASSISTANT, "content": "."})


class ChatTokens:
    """Conversations to tokens, by a template and a tokenizer.

    The text of a conversation is encoded as a whole, without what the tokenizer itself would add, such as a beginning.
    Wherever the text spells a control token it becomes that token, in messages too, as by `transformers`'
    `apply_chat_template(tokenize=True)`.

    Raises:
        UserError: the tokenizer lacks a special token that the template reads, or is one of characters.
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
        never wanted: nothing predicts it.

        Raises:
            UserError: see `ChatTemplate.write`; nothing is wanted.
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

        Raises:
            UserError: the template refuses the shortest conversation.
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
    """A tokenizer of the library that knows control tokens where text spells them.

    Args:
        tokenizer: of ordinary text; its separator becomes a control token if it is not one.
        special: more texts that become control tokens if they are in the vocabulary.

    Attributes:
        controls: ids of control tokens by their texts.
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
