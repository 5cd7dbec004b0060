"""In: blocks of a corpus' text, the number of characters in the train split. Out: chunks of similar size:
lists of texts of one split. Each text is to be encoded by itself.
Does not encode. Cuts a document only where no token id changes, with two exceptions: at the end of the train split, and
in a very long text without such a place."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from codescent.data.text.records import DocumentPiece

CHUNK_CHARS = 1 << 19
SEARCH_CHARS = 1 << 16  # a safe cut is searched in so many characters before the limit
NEAR_CHARS = 1 << 11  # and first in so many
WINDOW_CHARS = 256  # characters on either side that decide whether a cut is safe
MAX_TRIES = 64
MAX_UNCUT_CHARS = 1 << 23  # after so many characters without a safe cut the text is cut: a forced cut
_WORD_END = re.compile(r"\S(?=\s)")


@dataclass
class TextChunk:
    """Consecutive texts of one split.

    Attributes:
        split: "train" or "validation".
        segments: texts, each with a flag: a document ends with this text.
        characters, num_bytes, documents: number of characters, of their bytes in UTF-8, and of documents; a document
            counts in the chunk where it ends.
        forced_cuts: number of texts cut where ids may differ from those of the uncut text.
        begins: whether a document begins with the first text.
    """

    split: str
    segments: list[tuple[str, bool]] = field(default_factory=list)
    characters: int = 0
    num_bytes: int = 0
    documents: int = 0
    forced_cuts: int = 0
    begins: bool = True


def utf8_bytes(text: str) -> int:
    """Number of bytes of a text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogateescape"))


def split_point(characters: int, validation_fraction: float) -> int:
    """Characters of the train split: int(n * (1 - fraction)), as in nanoGPT."""
    return int(characters * (1.0 - validation_fraction))


def cut_chunks(
    blocks: Iterable[DocumentPiece], train_characters: int, context_free: bool, cut_is_safe: Callable[[str, str], bool]
) -> Iterator[TextChunk]:
    """Cut the corpus into chunks. They depend on the text and the tokenizer only, not on the number of workers.

    Args:
        train_characters: size of the train split; the rest is validation. The document on the border is cut there,
            into two separate texts.
        context_free, cut_is_safe: attribute and method of the tokenizer.
    """
    cutter = _Cutter(context_free, cut_is_safe)
    chunk = TextChunk("train" if train_characters else "validation")
    left_in_split = train_characters
    for block in blocks:
        cutter.pending += block.text
        while piece := cutter.next_piece(block.ends_document, left_in_split if chunk.split == "train" else None):
            text, ends_document, forced = piece
            chunk.segments.append((text, ends_document))
            chunk.characters += len(text)
            chunk.num_bytes += utf8_bytes(text)
            chunk.documents += ends_document
            chunk.forced_cuts += forced
            left_in_split -= len(text)
            border = chunk.split == "train" and left_in_split == 0 and (ends_document or bool(cutter.pending))
            if border or chunk.characters >= CHUNK_CHARS // 2:
                yield chunk
                chunk = TextChunk("validation" if border else chunk.split, begins=ends_document)
            if ends_document:
                break
    if chunk.segments:
        yield chunk


class _Cutter:
    """Holds the text of the current document that is not yet in a chunk."""

    def __init__(self, context_free: bool, cut_is_safe: Callable[[str, str], bool]) -> None:
        self.pending = ""
        self._limit = CHUNK_CHARS  # grows until a safe cut is found
        self._context_free, self._cut_is_safe = context_free, cut_is_safe

    def next_piece(self, ends_document: bool, border: int | None) -> tuple[str, bool, bool] | None:
        """(text, whether it ends the document, whether the cut was forced), or None: more text is needed.

        `ends_document`: the document ends with the pending text; `border`: characters until the split ends.
        """
        while len(self.pending) >= self._limit + WINDOW_CHARS and (border is None or border >= self._limit):
            place = self._safe_place(border)
            if place is not None:
                return self._take(place, False, False)
            if self._limit >= MAX_UNCUT_CHARS:
                return self._take(self._limit, False, True)
            self._limit += CHUNK_CHARS
        if border is not None and len(self.pending) > border:
            return self._take(border, False, False)
        if ends_document:
            return self._take(len(self.pending), True, False)
        return None

    def _take(self, count: int, ends_document: bool, forced: bool) -> tuple[str, bool, bool]:
        text, self.pending = self.pending[:count], self.pending[count:]
        self._limit = CHUNK_CHARS
        return text, ends_document, forced

    def _safe_place(self, border: int | None) -> int | None:
        """The last word end before the limit at which the tokenizer allows a cut; None: there is none."""
        if self._context_free:
            return self._limit
        ends = self._word_ends(min(NEAR_CHARS, SEARCH_CHARS))  # a text of words has enough there
        if len(ends) < MAX_TRIES:
            ends = self._word_ends(SEARCH_CHARS)
        for place in reversed(ends[-MAX_TRIES:]):
            left = self.pending[max(0, place - WINDOW_CHARS) : place]
            right = self.pending[place : min(place + WINDOW_CHARS, border or len(self.pending))]
            if self._cut_is_safe(left, right):
                return place
        return None

    def _word_ends(self, search_chars: int) -> list[int]:
        """Places between a word and white space, in the last `search_chars` characters before the limit."""
        return [match.end() for match in _WORD_END.finditer(self.pending, self._limit - search_chars, self._limit)]
