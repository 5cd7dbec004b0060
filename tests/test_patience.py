"""In: requests that wait at a server, times. Out: the workers for which others wait, named when the limit is over.
Does not run servers: test_parameter_server_faults does."""

from __future__ import annotations

import re

import pytest

from codescent.base.errors import RunFailed
from codescent.servers import Portion
from codescent.train import patience
from codescent.train.patience import SHARE, Patience

HELD = {1: Portion(6, 1), 2: Portion(6, 2)}


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(patience, "time", found)
    return found


@pytest.fixture
def waits(clock: Clock) -> Patience:
    """Worker 0 waits for 99 s, of at most 100."""
    found = Patience()
    found.timeout_s = 100.0 / SHARE
    found.begin()
    found.note(0, ("pull", 1), waits=True)
    clock.now_s += 99.0
    return found


def test_who_computes_is_named(waits: Patience, clock: Clock) -> None:
    waits.check(HELD, range(3))
    clock.now_s += 2.0
    with pytest.raises(RunFailed, match=re.escape("rank 1 (in step 7), rank 2 (in step 7) pushed nothing for 101.0 s")):
        waits.check(HELD, range(3))


def test_who_has_pushed_is_not_named(waits: Patience, clock: Clock) -> None:
    """It holds its portion until the push is applied."""
    clock.now_s += 2.0
    waits.note(2, ("push", 1), waits=True)
    with pytest.raises(RunFailed, match=r"^rank 1 \(in step 7\) pushed nothing .* and rank 0, rank 2 waited for it"):
        waits.check(HELD, range(3))


def test_who_asks_for_nothing_is_named_if_nobody_computes(waits: Patience, clock: Clock) -> None:
    clock.now_s += 2.0
    with pytest.raises(RunFailed, match=r"^rank 2 pushed nothing"):
        waits.check({}, {0, 2})  # 1 has died


def test_who_waits_alone_waits_for_nobody(waits: Patience, clock: Clock) -> None:
    clock.now_s += 2.0
    waits.check({}, {0})


@pytest.mark.parametrize("what", ["answered", "another request", "a step begins"])
def test_the_wait_begins_anew(waits: Patience, clock: Clock, what: str) -> None:
    if what == "answered":
        waits.note(0, ("pull", 1), waits=False)
        waits.note(0, ("pull", 1), waits=True)
    elif what == "another request":
        waits.note(0, ("ask", 2), waits=True)
    else:
        waits.begin()
    clock.now_s += 99.0
    waits.check(HELD, range(3))
    clock.now_s += 2.0
    with pytest.raises(RunFailed):
        waits.check(HELD, range(3))


def test_a_request_that_is_looked_at_again_waits_on(waits: Patience, clock: Clock) -> None:
    waits.note(0, ("pull", 1), waits=True)
    clock.now_s += 2.0
    with pytest.raises(RunFailed):
        waits.check(HELD, range(3))
