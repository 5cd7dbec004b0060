"""In: portions of work as they are done, ranks as they find none. Out: where all ranks meet; seconds of a step.
Does not give out portions: served_walk.py and pairs_walk.py do."""

from __future__ import annotations

from codescent.cost.events import Clock, Event
from codescent.plan import Plan

STEPS = 100
"""Steps that are walked where ranks meet seldom."""
ROUNDS = 40
"""The same, where workers push the changes of rounds of steps."""
PORTIONS, FEWEST = 400, 20
"""With many workers about PORTIONS portions are walked, but at least FEWEST steps or rounds."""
MEASURED = 0.2, 0.9
"""The part of them that is measured: before, ranks get into their order; behind, some find no work."""


class Handed:
    """Ranks that are given portions of a step. All meet at the end of a segment: where something is due.

    Attributes:
        staleness: of each update, in versions, or in averages.
        done_s: when each portion was done.
        dropped: portions that were given up.
    """

    def __init__(self, plan: Plan, clock: Clock) -> None:
        self.clock, self.workers, self.period = clock, plan.mesh.world_size, plan.schedule.period
        self.staleness: list[int] = []
        self.done_s: list[float] = []
        self.dropped = 0
        self.coming, self.met = 0, Event()

    @property
    def complete(self) -> int:
        """Steps that are complete."""
        return (len(self.done_s) + self.dropped) // self.workers * self.period

    def begin(self, first: int, end: int) -> None:
        """A segment begins: the steps `first` to `end` - 1. Called once, by the first rank that comes."""
        self.coming, self.met = 0, Event()

    def portion_done(self) -> None:
        """A portion is done now."""
        self.done_s.append(self.clock.now_s)

    def meet(self) -> Event:
        """A rank has come to the end of a segment. Returns the event that all have."""
        self.coming += 1
        if self.coming == self.workers:
            self.clock.happens(self.met)
        return self.met

    def step_s(self) -> float:
        """Seconds of a step in the measured part, where ranks do not meet. A portion that was given up is none."""
        first, last = (max(1, round(len(self.done_s) * share)) for share in MEASURED)
        seconds = self.done_s[last - 1] - self.done_s[first - 1]
        return seconds * self.workers / max(1, last - first) / self.period


def segments_of(plan: Plan, steps: int | None = None) -> list[range]:
    """The steps from one meeting of all ranks to the next.

    `steps`: of all of them; None: STEPS steps or ROUNDS rounds, with many workers fewer (PORTIONS). A segment that is
    longer has no meeting, see `meets`.
    """
    period, begin, found = plan.schedule.period, 0, list[range]()
    enough = max(FEWEST, PORTIONS // plan.mesh.world_size)
    most = steps or period * min(STEPS if period == 1 else ROUNDS, enough)
    while begin < most:
        end = plan.schedule.agrees_next(begin)
        if end > most:
            break
        found.append(range(begin, end))
        begin = end
    return found or [range(most)]


def meets(plan: Plan, segments: list[range]) -> bool:
    """Whether all ranks meet at the end of the last segment."""
    last = segments[-1]
    return plan.schedule.agrees_next(last.start) == last.stop
