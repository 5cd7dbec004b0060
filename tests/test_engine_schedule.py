"""In: rows that wait and run, few pages. Out: who gives up pages, and who comes next.
Does not read tokens (test_engine.py does)."""

from __future__ import annotations

from codescent.inference.pages import PagePool
from codescent.inference.request import Sampling
from codescent.inference.rows import TextRow
from codescent.inference.schedule import Capacity, TextScheduler


def test_who_gives_up_its_pages_comes_before_those_that_came_later() -> None:
    """Fault: a request that gave up its pages waits behind all that came after it, perhaps for ever."""
    pool = PagePool(5, 2)
    schedule = TextScheduler(pool, Capacity(rows=3, pages=5, page_size=2, step_tokens=8))
    first, second, third = (
        TextRow(number, [10 * number + at for at in range(length)], Sampling(), pool, 10)
        for number, length in ((0, 4), (1, 3), (2, 4))
    )
    schedule.waiting.extend((first, second, third))
    for _ in range(3):
        for row, new in schedule.next().items():
            row.has_read(new)
            row.tokens.append(7)
    assert schedule.preemptions == 1
    assert schedule.running == [first]
    assert list(schedule.waiting) == [second, third]
