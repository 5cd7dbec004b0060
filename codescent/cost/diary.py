"""In: waits and services as they end. Out: the list of them, to be drawn.
Does not simulate (ranks_walk.py does) and does not draw."""

from __future__ import annotations

from codescent.cost.doing import Activity, Doing
from codescent.cost.events import Clock


class Diary:
    """For what each rank has waited, and what each server has done.

    Attributes:
        is_kept: whether anybody reads it.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock, self.is_kept = clock, True
        self.activities: list[Activity] = []

    def waited(
        self, rank: int, why: Doing, begin_s: float, begun_s: float | None = None, asked_s: float | None = None
    ) -> None:
        """A rank has waited until now: from `asked_s` to `begun_s` for another rank.

        `asked_s`: None: from the begin. `begun_s`: None: not known, so it has not.
        """
        now_s = self.clock.now_s
        begun_s = min(max(begin_s, begin_s if begun_s is None else begun_s), now_s)
        asked_s = begin_s if asked_s is None else asked_s
        self._note(rank, why, begin_s, asked_s)
        self._note(rank, Doing.RANK, asked_s, begun_s)
        self._note(rank, why, begun_s, now_s)

    def did(self, server: int, what: Doing, begin_s: float) -> None:
        """A server has done something until now. To apply takes no time."""
        if self.is_kept:
            self.activities.append(Activity(server, what, begin_s, self.clock.now_s))

    def _note(self, rank: int, why: Doing, begin_s: float, end_s: float) -> None:
        if self.is_kept and end_s > begin_s:
            self.activities.append(Activity(rank, why, begin_s, end_s))
