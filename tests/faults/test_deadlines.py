"""In: pages of ranks, as a run writes them. Out: how long its launcher lets them stand still.
Does not start a rank: test_hang.py does."""

from __future__ import annotations

import math

from codescent.base.page import Page, Took
from codescent.base.progress import ENDED
from codescent.launch.deadlines import FIRST_S, FLOOR_S, START_S, Deadlines


def test_a_deadline_follows_what_the_part_took_in_this_run() -> None:
    """Fault: a first step that compiles, a long save or a slow link counts as a hang; or a hang is told late."""
    found = Deadlines()
    assert found.of(Page()) == START_S
    assert found.of(Page(position=0.5)) == FIRST_S
    assert found.of(Page(position=0.5, section="save")) == FIRST_S
    assert found.of(Page(section="preparation")) == found.of(Page(section="script")) == math.inf
    assert found.of(Page(position=0.5, section="answers")) == math.inf  # a function of rewards may take a minute
    for look in range(40):  # four steps of 4 s each, after one of 60 s; every rank's first look counts nothing
        now_s, step = 60.0 + look, look // 4 + 1
        found.learn({0: Page(position=step + 0.1), 1: Page(position=ENDED)}, now_s if look else 0.0)
    assert found.of(Page(position=9.5)) == 20.0
    spent = [("save", number, seconds) for number, seconds in enumerate((1.0, 30.0, 31.0), start=1)]
    for row in spent:
        for _ in range(3):  # a page is read again and again
            found.learn({0: Page(position=11.1, spent=(row,))}, 120.0)
    assert found.of(Page(position=11.1, section="save")) == 150.0
    assert found.of(Page(position=11.1, section="validation")) == FIRST_S


def test_the_start_is_no_step() -> None:
    """Fault: where the first steps end between two looks, the start counts as a step, and a hang is told late."""
    found = Deadlines()
    found.learn({0: Page()}, 0.0)
    found.learn({0: Page(position=2.5, took=Took(2, 0.0, 0.2))}, 40.0)
    found.learn({0: Page(position=30.0, took=Took(30, 0.0, 3.0))}, 41.0)
    assert found.of(Page(position=30.0)) == FLOOR_S


def test_quick_parts_have_the_floor_and_slow_ones_the_cap() -> None:
    """Fault: a pause of half a second is a hang, or a deadline outlasts parallel.timeout_s."""
    found = Deadlines(40.0)
    for step in range(9):
        found.learn({0: Page(position=100.0 + step, spent=(("save", step, 100.0), ("reading", step, 0.001)))}, step / 9)
    assert found.of(Page(position=109.0)) == found.of(Page(position=109.0, section="reading")) == FLOOR_S
    assert found.of(Page(position=109.0, section="save")) == found.of(Page(position=0.1, section="validation")) == 40.0
