"""In: text, or ids. Out: ids, or text. Contains the interface `Tokenizer` and two tokenizers: character, byte.
Does not do BPE or WordPiece (bpe.py and wordpiece.py do)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from codescent.base.durable import replace_file
from codescent.base.errors import UserError
from codescent.base.json_damage import json_problem
from codescent.base.reading import read_text
from codescent.data.tokenizers.bpe import LibraryTokenizer, check_range
from codescent.data.tokenizers.wordpiece import WordPiece, is_wordpiece

TokenArray = npt.NDArray[Any]  # uint16 or uint32, see token_dtype
SEPARATOR_TEXT = "<|endoftext|>"
NO_END = (
    "the tokenizer has no end token; if the model has one, name it as eos_token in the tokenizer_config.json beside "
    "tokenizer.json"
)
REPLACEMENT = "\ufffd"  # decoders write it for bytes that are not UTF-8, or not yet complete


class Tokenizer(Protocol):
    """The interface of a tokenizer: text to ids and back.

    Attributes:
        vocab_size: ids lie in [0, vocab_size).
        separator: the id that ends each document of a corpus with several documents; None: there is no such id.
        opening: ids before the first token of each text, such as that of <s>.
        closing: ids after the last token of each text, which the tokenizer itself adds.
        context_free: True if cutting a text anywhere does not change its ids.
    """

    vocab_size: int
    separator: int | None
    opening: tuple[int, ...]
    closing: tuple[int, ...]
    context_free: bool

    def encode(self, text: str) -> TokenArray:
        """Ids of a text, in the vocabulary's `token_dtype`, without `opening` and `closing`.
        Text that spells a control token is ordinary text."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of ids; bytes that are not UTF-8 become U+FFFD."""

    def cut_is_safe(self, left: str, right: str) -> bool:
        """Whether cutting a text between these neighbours leaves its ids unchanged."""

    def save(self, path: Path) -> None:
        """Write a JSON file for `load`."""


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Little-endian uint16 for up to 65,536 ids, else uint32."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


class _ContextFree:
    """A tokenizer whose ids do not depend on neighbouring characters; `_fields` is the content of its file."""

    context_free = True
    opening: tuple[int, ...] = ()
    closing: tuple[int, ...] = ()
    _fields: dict[str, Any]

    def cut_is_safe(self, left: str, right: str) -> bool:
        """True: any cut is safe."""
        return True

    def save(self, path: Path) -> None:
        """Write it as JSON, for `load`."""
        replace_file(path, json.dumps(self._fields))


class CharTokenizer(_ContextFree):
    """One id per character of a sorted alphabet without duplicates, and optionally a last one for document ends."""

    def __init__(self, characters: str, with_separator: bool) -> None:
        self.characters = characters
        self.separator: int | None = len(characters) if with_separator else None
        self.vocab_size = len(characters) + with_separator
        points = np.frombuffer(characters.encode("utf-32-le"), "<u4")
        self._ids = np.full(int(points.max(initial=0)) + 1, -1, np.int32)
        self._ids[points] = np.arange(len(points), dtype=np.int32)
        self._dtype = token_dtype(self.vocab_size)
        self._texts = [*characters, *([SEPARATOR_TEXT] if with_separator else [])]
        self._fields = {"codescent_tokenizer": "char", "characters": characters, "separator": with_separator}

    def encode(self, text: str) -> TokenArray:
        """Ids of a text. Raises UserError with the characters that the alphabet lacks."""
        points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
        ids = self._ids.take(points, mode="clip")
        if points.max(initial=0) >= len(self._ids) or ids.min(initial=0) < 0:
            missing = sorted(set(text) - set(self.characters))
            shown = ", ".join(f"{char!r} (U+{ord(char):04X})" for char in missing[:10])
            raise UserError(
                f"the character tokenizer of this corpus does not know {shown}: its alphabet is that of the corpus; "
                'the tokenizers "byte" and "bpe:VOCAB" know every character'
            )
        return ids.astype(self._dtype)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of ids. Raises ValueError for an id outside the vocabulary."""
        check_range(tokens, self.vocab_size)
        return "".join(self._texts[token] for token in tokens)


class ByteTokenizer(_ContextFree):
    """The 256 bytes of UTF-8, and id 256 for the end of a document: the same vocabulary for every corpus."""

    vocab_size = 257
    separator: int | None = 256
    _fields = {"codescent_tokenizer": "byte"}  # noqa: RUF012 - never changed

    def encode(self, text: str) -> TokenArray:
        """Ids of a text's UTF-8 bytes."""
        return np.frombuffer(text.encode("utf-8", "surrogateescape"), np.uint8).astype("<u2")

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of ids; bytes that are not UTF-8 become U+FFFD. Raises ValueError for an id outside the vocabulary."""
        check_range(tokens, self.vocab_size)
        end = SEPARATOR_TEXT.encode()
        parts = (end if token == self.separator else bytes((token,)) for token in tokens)
        return b"".join(parts).decode(errors="replace")


def load(path: Path) -> Tokenizer:
    """Read a file that `save` wrote, or a JSON file of the tokenizers library. Raises UserError: not a tokenizer."""
    return of_text(*fields_of(path), str(path))


def of_text(text: str, fields: Any, path: str) -> Tokenizer:
    """The tokenizer of such a file's text, which is `fields` as JSON; `path` is for messages. Raises UserError."""
    match fields:
        case {"codescent_tokenizer": "library", "end": int() | None as end, "tokenizer": dict(inner)}:
            recorded = LibraryTokenizer.from_json(json.dumps(inner), path, obeys=True)
            if end is not None and end not in recorded.vocabulary.values():
                raise UserError(f"{path}: not a tokenizer: no token has the id {end}, which ends documents")
            return recorded.ended_by(end)
        case {"codescent_tokenizer": "char", "characters": str(characters), "separator": bool(with_separator)}:
            if any("\ud800" <= character <= "\udfff" for character in characters):
                raise UserError(f"{path}: not a tokenizer: its alphabet has half of a surrogate pair, no character")
            return CharTokenizer(characters, with_separator)
        case {"codescent_tokenizer": "byte"}:
            return ByteTokenizer()
    kind = WordPiece if is_wordpiece(fields) else LibraryTokenizer
    return kind.from_json(text, path)


def fields_of(path: Path) -> tuple[str, Any]:
    """The text and the JSON value of a file. Raises UserError: it cannot be read, or is not JSON."""
    try:
        text = read_text(path)
        return text, json.loads(text)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not a tokenizer: not JSON ({json_problem(error)})") from error


def document_end(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The ids after a document that another one follows, or after a response: `closing`, and then the separator.
    The separator is not repeated.
    """
    end = () if tokenizer.separator in (None, *tokenizer.closing[-1:]) else (tokenizer.separator,)
    return (*tokenizer.closing, *end)


def encode_segments(
    tokenizer: Tokenizer, segments: Iterable[tuple[str, bool]], separate: bool, begins: bool = True
) -> TokenArray:
    """Concatenated ids of consecutive texts. A segment is (text, whether a document ends with it).

    Each document begins with the tokenizer's `opening` and ends with its `closing`.

    Args:
        tokenizer: of the ids.
        segments: the texts.
        separate: add the separator, if the tokenizer has one, after each document.
        begins: whether a document begins with the first text.
    """
    dtype = token_dtype(tokenizer.vocab_size)
    begin = np.array(tokenizer.opening, dtype)
    end = np.array(document_end(tokenizer) if separate else tokenizer.closing, dtype)
    parts: list[TokenArray] = [np.empty(0, dtype)]
    for text, ends_document in segments:
        parts += [begin] if begins else []
        parts.append(tokenizer.encode(text))
        parts += [end] if ends_document else []
        begins = ends_document
    return np.concatenate(parts)
