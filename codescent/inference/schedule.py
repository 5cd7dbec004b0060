"""In: rows that wait and run, pages. Out: which rows the next pass reads, and how many tokens of each.
Does not run the pass. It reads no clock, so the same calls give the same passes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from codescent.inference.pages import PagePool
from codescent.inference.rows import TextRow


@dataclass(frozen=True)
class Capacity:
    """How much an engine holds at a time.

    Attributes:
        rows: requests that run at a time; others wait.
        pages: pages of keys and values in memory.
        page_size: tokens of a page. Only whole pages are shared between requests.
        step_tokens: tokens that a step reads at most. A longer prompt is read in several steps, beside other requests.
    """

    rows: int = 16
    pages: int = 1024
    page_size: int = 16
    step_tokens: int = 512

    def problems(self) -> Iterator[str]:
        """One sentence for each value that is out of range."""
        for name, value in vars(self).items():
            if value < 1:
                yield f"{name} {value}: must be at least 1"
        if self.step_tokens < self.rows:
            yield f"step_tokens {self.step_tokens}: must be at least rows = {self.rows}: each row reads a token"


class TextScheduler:
    """First come, first served. Rows that only need their next token come first in each pass; prompts get the rest.

    Where pages run out, the youngest row gives up its own and waits again, as the first. Its text is read again later
    (recomputation; Kwon et al. 2023, "PagedAttention", section 4.5).

    Attributes:
        waiting, running: rows in the order in which they came.
        preemptions: how often a row gave up its pages.
    """

    def __init__(self, pool: PagePool, capacity: Capacity) -> None:
        self.waiting: deque[TextRow] = deque()
        self.running: list[TextRow] = []
        self.preemptions = 0
        self._pool, self._capacity = pool, capacity

    def next(self) -> dict[TextRow, int]:
        """The rows of the next pass, each with how many tokens it reads. The pages have room for any row alone."""
        chosen, left = dict[TextRow, int](), self._capacity.step_tokens
        for row in sorted(self.running, key=lambda row: row.unread > 1):
            if row not in self.running:
                continue  # it has given up its pages
            row.begin()
            new = min(row.unread, left)
            if new < 1:
                continue
            if self._reserve(row, new, chosen):
                chosen[row] = new
                left -= new
        while self.waiting and len(self.running) < self._capacity.rows and left:
            row = self.waiting[0]
            row.begin()
            # Each running row may soon need another page.
            spare = len(self.running)
            if self.running and row.pages_missing(row.unread) + spare > self._pool.available():
                row.leave()
                break
            new = min(row.unread, left)
            self.running.append(self.waiting.popleft())
            if not row.reserve(new):
                self._preempt(row, chosen)
                break
            chosen[row] = new
            left -= new
        return chosen

    def remove(self, row: TextRow) -> None:
        """A row has ended: its pages are for others."""
        row.leave()
        if row in self.running:
            self.running.remove(row)
        elif row in self.waiting:
            self.waiting.remove(row)

    def _reserve(self, row: TextRow, new: int, chosen: dict[TextRow, int]) -> bool:
        """Take pages for a row, if need be those of the youngest. False: it is the youngest, and gave up its own."""
        while not row.reserve(new):
            youngest = self.running[-1]
            self._preempt(youngest, chosen)
            if youngest is row:
                return False
        return True

    def _preempt(self, row: TextRow, chosen: dict[TextRow, int]) -> None:
        chosen.pop(row, None)
        self.running.remove(row)
        row.leave()
        self.waiting.appendleft(row)
        self.preemptions += 1
