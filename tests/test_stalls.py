"""In: requests that wait at a server, times. Out: the workers for which others wait, named when the limit is over.
Does not run servers: test_parameter_server_faults does."""

from __future__ import annotations

import re
from typing import Any

import pytest
from clock import Clock

from codescent.base.errors import RunFailed
from codescent.coupling import failure_detector
from codescent.coupling.coordinate import Coordinator
from codescent.coupling.failure_detector import SHARE, StallTimeout
from codescent.servers import Portion

HELD = {1: Portion(6, 1), 2: Portion(6, 2)}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock(100.0)
    monkeypatch.setattr(failure_detector, "time", found)
    return found


@pytest.fixture
def waits(clock: Clock) -> StallTimeout:
    """Worker 0 waits for 99 s, of at most 100."""
    found = StallTimeout()
    found.timeout_s = 100.0 / SHARE
    found.begin()
    found.note(0, ("pull", 1), waits=True)
    clock.now_s += 99.0
    return found


def test_who_computes_is_named(waits: StallTimeout, clock: Clock) -> None:
    waits.check(HELD, range(3))
    clock.now_s += 2.0
    with pytest.raises(RunFailed, match=re.escape("rank 1 (in step 7), rank 2 (in step 7) pushed nothing for 101.0 s")):
        waits.check(HELD, range(3))


def test_who_has_pushed_is_not_named(waits: StallTimeout, clock: Clock) -> None:
    """It holds its portion until the push is applied."""
    clock.now_s += 2.0
    waits.note(2, ("push", 1), waits=True)
    with pytest.raises(RunFailed, match=r"^rank 1 \(in step 7\) pushed nothing .* and rank 0, rank 2 waited for it"):
        waits.check(HELD, range(3))


def test_who_asks_for_nothing_is_named_if_nobody_computes(waits: StallTimeout, clock: Clock) -> None:
    clock.now_s += 2.0
    with pytest.raises(RunFailed, match=r"^rank 2 pushed nothing"):
        waits.check({}, {0, 2})  # 1 has died


def test_who_waits_alone_waits_for_nobody(waits: StallTimeout, clock: Clock) -> None:
    clock.now_s += 2.0
    waits.check({}, {0})


@pytest.mark.parametrize("what", ["answered", "another request", "a step begins"])
def test_the_wait_begins_anew(waits: StallTimeout, clock: Clock, what: str) -> None:
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


def test_a_request_that_is_looked_at_again_waits_on(waits: StallTimeout, clock: Clock) -> None:
    waits.note(0, ("pull", 1), waits=True)
    clock.now_s += 2.0
    with pytest.raises(RunFailed):
        waits.check(HELD, range(3))


REPORT = {"loss": 1.0, "losses": 1, "square": 1.0, "stop": False, "skipped": False, "staleness": 0}


def test_ranks_of_gossip_hear_of_one_that_stands_still(clock: Clock) -> None:
    """Each that waits is told the same, before it would blame rank 0."""
    found = Coordinator(3, 0, 100.0)
    found.begin(0, 1)
    given = [found.answer(rank, {"known": 0}) for rank in range(3)]
    reports = [{"known": 0, "report": {"portion": one["portion"], **REPORT}} for one in given if one]
    assert [found.answer(rank, reports[rank]) for rank in (0, 1)] == [None, None]
    clock.now_s += 91.0
    said = "rank 2 (in step 1) computed nothing for 91.0 s (parallel.timeout_s), and rank 0, rank 1 waited for it"
    assert [found.answer(rank, reports[rank]) for rank in (0, 1)] == [{"over": said}] * 2


def test_ranks_of_gossip_wait_for_validations_and_saves(clock: Clock) -> None:
    found = Coordinator(1, 0, 100.0)
    found.begin(0, 1)
    given = found.answer(0, {"known": 0})
    assert given is not None
    told = found.answer(0, {"known": 0, "report": {"portion": given["portion"], **REPORT}})
    assert told is not None
    assert told["ends"]
    clock.now_s += 1000.0
    assert found.answer(0, {"known": 1}) is None


def test_who_waited_in_an_earlier_segment_does_not_wait_in_the_next(clock: Clock) -> None:
    """Rank 1 waits for the end of the first segment, hears of it, and asks for nothing in the second one."""
    found = Coordinator(3, 0, 100.0)

    def answered(rank: int, known: int, given: dict[str, Any] | None) -> dict[str, Any] | None:
        report = {} if given is None else {"report": {"portion": given["portion"], **REPORT}}
        return found.answer(rank, {"known": known, **report})

    found.begin(0, 1)
    given = [answered(rank, 0, None) for rank in range(3)]
    assert answered(1, 0, given[1]) is None
    assert answered(0, 0, given[0]) is None
    assert all(answered(rank, 0, given[rank]) is not None for rank in (2, 0, 1))
    found.begin(1, 2)
    first, second = answered(0, 1, None), answered(2, 1, None)
    assert second is not None
    assert answered(0, 1, answered(0, 1, first)) is None
    clock.now_s += 91.0
    told = answered(0, 1, None)
    assert told is not None
    assert told["over"].startswith("rank 2 (in step 2) computed nothing for 91.0 s")
    assert told["over"].endswith("and rank 0 waited for it")
