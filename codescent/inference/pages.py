"""In: tokens of texts. Out: pages of memory for them. Full pages with the same beginning of a text are shared.
Does not hold keys and values (operators/cache.py does) or decide who gives up its pages (schedule.py does)."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

Key = bytes
"""Identifies the tokens of a full page and all tokens before it: a hash of them and of the key of the page before."""
NOTHING: Key = b""
"""The key before the first page of a text."""
_FREED = 16
"""Pages that are freed at a time, of those that nobody reads: together they are more often neighbours."""


class PagePool:
    """Pages of a fixed number of tokens. A page has as many readers as requests whose text it holds.

    A full page whose readers have left stays, for requests that begin with the same tokens. Such pages are freed as new
    ones are needed: first that whose last reader left first, and of one reader the last ones of its text.

    Attributes:
        used: pages with a reader.
    """

    def __init__(self, pages: int, page_size: int) -> None:
        self.pages, self.page_size, self.used = pages, page_size, 0
        self._readers = [0] * pages
        self._free = bytearray(b"\1" * pages)  # 1: it has no reader, and holds nothing
        self._page_of: dict[Key, int] = {}
        self._key_of: dict[int, Key] = {}
        self._unread: OrderedDict[int, None] = OrderedDict()  # full pages without a reader, the first to be freed first

    def begin(self, tokens: Sequence[int]) -> tuple[list[int], Key]:
        """The pages that hold a text's first tokens already, with one more reader: as many full pages as there are.

        Returns them, and the key of the last one. At least one token of the text is in none of them, so that the model
        reads something.
        """
        found, key = list[int](), NOTHING
        for start in range(0, len(tokens) - self.page_size, self.page_size):
            following = _key(key, tokens[start : start + self.page_size])
            page = self._page_of.get(following)
            if page is None:
                break
            key = following
            if not self._readers[page]:
                del self._unread[page]
                self.used += 1
            self._readers[page] += 1
            found.append(page)
        return found, key

    def take(self, before: int | None) -> int | None:
        """A page that holds nothing, with one reader; None: there is none. `before`: the page before it in its text.

        If possible, it is the next page in memory, so that attention reads one piece.
        """
        wanted = -1 if before is None else before + 1
        if not (0 <= wanted < self.pages and self._free[wanted]):
            if 1 not in self._free:
                self._free_some()
            wanted = self._beginning()
        if wanted < 0:
            return None
        self._free[wanted], self._readers[wanted] = 0, 1
        self.used += 1
        return wanted

    def keep(self, page: int, tokens: Sequence[int], before: Key) -> Key:
        """A page is full: others may read it from now on. Returns its key.

        A page with the same text may be there already: then this one stays its reader's alone. `before`: the key of the
        page before it in its text.
        """
        key = _key(before, tokens)
        if key not in self._page_of:
            self._page_of[key], self._key_of[page] = page, key
        return key

    def leave(self, pages: Sequence[int]) -> None:
        """A reader leaves the pages of its text, which are in the order of the text."""
        for page in reversed(pages):
            self._readers[page] -= 1
            if not self._readers[page]:
                self.used -= 1
                if page in self._key_of:
                    self._unread[page] = None
                else:
                    self._free[page] = 1

    def forget(self) -> None:
        """No page that is there now is shared later: what they hold is not what the model would compute now."""
        for page in self._unread:
            self._free[page] = 1
        self._unread.clear()
        self._page_of.clear()
        self._key_of.clear()

    def available(self) -> int:
        """Pages without a reader."""
        return self.pages - self.used

    def _free_some(self) -> None:
        """Forget what pages without a reader hold."""
        for _ in range(min(_FREED, len(self._unread))):
            page, _ = self._unread.popitem(last=False)
            del self._page_of[self._key_of.pop(page)]
            self._free[page] = 1

    def _beginning(self) -> int:
        """A free page to begin with: in the middle of the longest row of free pages, or its first at either end.

        So texts on both sides may grow. -1: none is free.
        """
        first, length = -1, 0
        at = self._free.find(1)
        while at >= 0:
            end = self._free.find(0, at)
            end = self.pages if end < 0 else end
            if end - at > length:
                first, length = at, end - at
            at = self._free.find(1, end)
        return first if first <= 0 else first + length // 2


def _key(before: Key, tokens: Sequence[int]) -> Key:
    return hashlib.blake2b(before + array("q", tokens).tobytes(), digest_size=16).digest()
