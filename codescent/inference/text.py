"""In: new tokens of a request, one by one. Out: text that is complete and certain, and whether a stop text was found.
Does not choose tokens, or print."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from codescent.data.tokenizers.tokenizer import REPLACEMENT


class TextStream:
    """Decodes tokens one by one. A character of several tokens is returned when its last token arrives.

    `decode` returns the text of token ids, with U+FFFD for bytes that are not UTF-8.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._context: list[int] = []  # tokens whose text was returned: some decoders need the tokens before
        self._pending: list[int] = []  # tokens whose text was not returned yet, or only in part
        self._shown = 0  # number of returned characters of both

    def push(self, token: int) -> str:
        """Add a token. Returns the text that it completes, or ""."""
        self._pending.append(token)
        text = self._decode(self._context + self._pending)
        # Bytes that may still become a character are one U+FFFD at the end of the text. Any other U+FFFD is final.
        return self._show(text.removesuffix(REPLACEMENT), whole=not text.endswith(REPLACEMENT))

    def finish(self) -> str:
        """Return the text of the remaining tokens, even if their last character is incomplete."""
        return self._show(self._decode(self._context + self._pending), whole=True)

    def _show(self, text: str, *, whole: bool) -> str:
        piece = text[self._shown :]
        self._shown = max(self._shown, len(text))
        if whole and self._pending:
            self._context, self._pending = self._pending, []
            self._shown = len(self._decode(self._context))
        return piece


class StopText:
    """Finds the first of several texts in a text that arrives in pieces, and withholds what may become one of them."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops, self._held, self.found = tuple(stops), "", False

    def push(self, piece: str, *, ends: bool = False) -> str:
        """Add a piece. Returns the text before a stop text, as far as it is certain; with `ends` all that is left.

        After a stop text was found, nothing is returned.
        """
        if self.found:
            return ""
        text = self._held + piece
        places = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if places:
            self.found, self._held = True, ""
            return text[: min(places)]
        held = 0 if ends else max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of the text with which the stop text begins."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
