"""In: connections of workers that end and are made again, a clock. Out: who is taken for dead, and when.
Does not lose a connection: test_dead_hosts.py does."""

from __future__ import annotations

import pytest
from clock import Clock

from codescent.coupling import failure_detector
from codescent.coupling.failure_detector import CLOSED_S, SHARE, SILENT_S, FailureDetector
from codescent.coupling.membership import Death
from codescent.transport import Refused

TIMEOUT_S = 600.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock(100.0)
    monkeypatch.setattr(failure_detector, "time", found)
    return found


def known(timeout_s: float = TIMEOUT_S, *, goes_on: bool = True) -> FailureDetector:
    """Workers 1 and 2 are connected."""
    found = FailureDetector(timeout_s, goes_on=goes_on)
    found.met(1, "host1")
    found.met(2, "host2")
    found.connected = lambda: {2}
    return found


@pytest.mark.parametrize(
    ("silent", "timeout_s", "goes_on", "limit_s"),
    [
        (False, TIMEOUT_S, True, CLOSED_S),
        (True, TIMEOUT_S, True, SILENT_S),
        (True, 20.0, True, 10.0),
        (False, 2.0, True, 1.0),
        (False, TIMEOUT_S, False, CLOSED_S),
        (True, TIMEOUT_S, False, SHARE * TIMEOUT_S),
    ],
)
def test_a_worker_without_a_connection_dies_at_its_limit(
    clock: Clock, silent: bool, timeout_s: float, goes_on: bool, limit_s: float
) -> None:
    found = known(timeout_s, goes_on=goes_on)
    found.left(1, 6, silent=silent)
    clock.now_s += limit_s
    assert found.deaths() == {}
    clock.now_s += 0.1
    assert found.deaths() == {1: Death(100.0, 6, "host1")}
    what = "silent" if silent else "not connected"
    assert found.how(1) == f"was {what} for {limit_s:g} s (on host1, in step 7)"


def test_who_is_dead_is_not_let_in_again(clock: Clock) -> None:
    found = known()
    found.left(1, 6, silent=False)
    clock.now_s += CLOSED_S + 1
    before = found.deaths()
    with pytest.raises(Refused, match=r"the others have gone on without rank 1, which was not connected for 3 s"):
        found.met(1, "host1")
    found.left(1, 9, silent=True)  # its work is given out again
    clock.now_s += SILENT_S + 1
    assert found.deaths() == before


def test_who_connects_again_lives(clock: Clock) -> None:
    found = known()
    found.left(1, 6, silent=False)
    clock.now_s += 2.0
    found.met(1, "host1")
    clock.now_s += SILENT_S + 1
    assert found.deaths() == {}


def test_an_old_connection_whose_end_is_noticed_late_kills_nobody(clock: Clock) -> None:
    """The next one is greeted by then."""
    found = known()
    found.met(2, "host2")
    found.left(2, 6, silent=False)
    clock.now_s += SILENT_S + 1
    assert found.deaths() == {}
    found.connected = tuple
    assert found.deaths() == {}
