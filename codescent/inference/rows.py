"""In: requests. Out: `TextRow`, what an engine knows of a request: its tokens, and how many of them the model has read.
Does not decide when the model reads them (schedule.py does)."""

from __future__ import annotations

from codescent.inference.pages import NOTHING, PagePool
from codescent.inference.request import Sampling
from codescent.operators.cache import RowPart, TextPages


def context_start(length: int, seq_len: int) -> int:
    """Number of tokens to drop from the start of a text of `length` tokens, so that the rest fits into seq_len.

    Cached keys depend on absolute positions, so the model must read a shifted window again. The window therefore shifts
    by a quarter of seq_len at a time. Of a long text the model always sees at least 3/4 of seq_len tokens.
    """
    stride = max(1, seq_len // 4)
    return max(0, -(-(length - seq_len) // stride) * stride)


class TextRow:
    """A request's text.

    Attributes:
        request: its id.
        tokens: of the prompt, and the new ones.
        sampling: how the next one is chosen.
        prompt_tokens: how many of the tokens the prompt has.
        start: tokens before it are no longer in the model's context.
        read: tokens from `start` on whose keys and values are in `pages`.
        shared: of them, those found in pages of other requests when the row began to read.
    """

    def __init__(self, request: int, prompt: list[int], sampling: Sampling, pool: PagePool, seq_len: int) -> None:
        self.request, self.tokens, self.sampling = request, prompt, sampling
        self.prompt_tokens, self.start = len(prompt), context_start(len(prompt), seq_len)
        self._pool, self._seq_len, self._key = pool, seq_len, NOTHING
        self.read = self.shared = 0
        self.pages = TextPages(pool.page_size)

    @property
    def new_tokens(self) -> int:
        """How many tokens were generated."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def unread(self) -> int:
        """Tokens that the model has to read before the next one is chosen."""
        return len(self.tokens) - self.start - self.read

    def begin(self) -> None:
        """Find pages that hold the first tokens already, if none is read."""
        if self.read == 0 and not self.pages.numbers:
            numbers, self._key = self._pool.begin(self.tokens[self.start :])
            self.pages = TextPages(self._pool.page_size, numbers)
            self.read = self.shared = len(numbers) * self._pool.page_size

    def pages_missing(self, new: int) -> int:
        """How many pages are needed to read so many more tokens."""
        return max(0, -(-(self.read + new) // self._pool.page_size) - len(self.pages.numbers))

    def reserve(self, new: int) -> bool:
        """Take the pages for so many more tokens. False: there are not enough; it keeps those that it got."""
        for _ in range(self.pages_missing(new)):
            page = self._pool.take(self.pages.numbers[-1] if self.pages.numbers else None)
            if page is None:
                return False
            self.pages.append(page)
        return True

    def part(self, new: int) -> RowPart:
        """What a pass reads of it."""
        return RowPart(new, self.read + new, self.pages)

    def next_tokens(self, new: int) -> list[int]:
        """The next tokens to read."""
        first = self.start + self.read
        return self.tokens[first : first + new]

    def has_read(self, new: int) -> None:
        """So many tokens more are in the pages. Those that are full may be shared."""
        size, before = self._pool.page_size, self.read
        self.read += new
        for number in range(before // size, self.read // size):
            first = self.start + number * size
            self._key = self._pool.keep(self.pages.numbers[number], self.tokens[first : first + size], self._key)

    def leave(self) -> None:
        """Give back all pages. What they held must be read again."""
        self._pool.leave(self.pages.numbers)
        self.pages, self.read, self._key = TextPages(self._pool.page_size), 0, NOTHING

    def slide(self) -> None:
        """Drop the oldest tokens from the model's context, if it is full. The rest has other positions then."""
        start = context_start(len(self.tokens), self._seq_len)
        if start != self.start:
            self.leave()
            self.start = start
