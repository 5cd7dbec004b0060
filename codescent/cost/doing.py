"""In: nothing. Out: what a rank does beside its instructions, in one interval: for what it waits, what a server does.
Does not simulate (simulate.py and ranks_walk.py do) and has no colours (report/style.py has)."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import accumulate
from typing import Any, Protocol, TypeVar

from codescent.trace.intervals import Interval, union, without


class Doing(StrEnum):
    """For what a rank waits, or what a server does."""

    SERVER = "wait_server"  # it receives, applies and answers
    RANK = "wait_rank"  # another rank, or stage, has not come yet: it computes
    COLLECTIVE = "wait_collective"  # all have come
    MESSAGE = "wait_message"  # it is under way
    RECEIVE = "receive"
    APPLY = "apply"
    ANSWER = "answer"


SERVES = (Doing.RECEIVE, Doing.APPLY, Doing.ANSWER)
"""What a server does. All others are waits."""


@dataclass(frozen=True)
class Activity:
    """What a rank or a stage does from `start_s` to `end_s`. To apply takes no time of its own.

    `stage`: of a walk over ranks the rank.
    """

    stage: int
    doing: Doing
    start_s: float
    end_s: float


class Timespan(Protocol):
    """What has a begin and an end."""

    @property
    def start_s(self) -> float:
        """The begin."""

    @property
    def end_s(self) -> float:
        """The end."""


_T = TypeVar("_T", bound=Timespan)


@dataclass(frozen=True)
class Window:
    """The time from `begin_s` to `end_s`."""

    begin_s: float
    end_s: float

    def cut(self, found: Iterable[_T]) -> tuple[_T, ...]:
        """What lies in the window at least in part, cut at its edges, with times from its begin.

        What takes no time is in it from its begin on, and not at its end.
        """
        return tuple(self._cut(one) for one in found if self._has(one))

    def _has(self, one: Timespan) -> bool:
        takes_time = one.end_s > one.start_s
        return one.start_s < self.end_s and (one.end_s > self.begin_s if takes_time else one.start_s >= self.begin_s)

    def _cut(self, one: _T) -> _T:
        start_s, end_s = max(one.start_s, self.begin_s), min(one.end_s, self.end_s)
        cut: Any = one  # a dataclass, which a protocol cannot say
        times = {"start_s": start_s - self.begin_s, "end_s": end_s - self.begin_s}
        if getattr(one, "waits_s", 0.0) > end_s - start_s:
            times["waits_s"] = end_s - start_s
        return replace(cut, **times)  # type: ignore[no-any-return]


class OrderedSpans:
    """Intervals by their begin, to find those at a time. Few of them are as long as many others."""

    def __init__(self, found: Iterable[Timespan]) -> None:
        self._found = sorted(found, key=lambda one: one.start_s)
        self._starts = [one.start_s for one in self._found]
        self._latest = list(accumulate((one.end_s for one in self._found), max))

    def during(self, one: Timespan) -> list[Timespan]:
        """Those that share time with an interval."""
        first, stop = bisect_right(self._latest, one.start_s), bisect_left(self._starts, one.end_s)
        return [other for other in self._found[first:stop] if other.end_s > one.start_s]


def parts_without(one: Timespan, others: Iterable[Timespan]) -> list[Interval]:
    """The parts of an interval outside of others, as begin and end."""
    return without([(one.start_s, one.end_s)], union((other.start_s, other.end_s) for other in others))
