"""In: what ranks do between two steps: validations, saves and so on. Out: its seconds; all ranks begin the next step.
Does not decide what is done (loop.py does). The parts of a step are measured by base/stopwatch.py."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from codescent.base.progress import OwnPage
from codescent.train.world import World

VALIDATION, SAVE, COMPARISON = "validation", "save", "comparison"
REMOVAL, PROFILE, LOGGERS = "removal of checkpoints", "profile", "loggers"


class Beside:
    """The time that a run spends beside its steps, on all ranks alike.

    A rank may do more than others: rank 0 deletes old checkpoints, and calls the functions of log.to. Without `meet`
    the others would begin the next step, and wait in it: that would count as communication.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.seconds: dict[str, float] = {}
        self.last = ""  # what was done last since all ranks met; "": nothing

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """A block between two steps that every rank enters, whatever it does there."""
        begin, page = time.perf_counter(), OwnPage.current
        if page is not None:
            page.enter(what)
        try:
            yield
        finally:
            self.add(what, time.perf_counter() - begin)
            if page is not None:
                page.enter("")

    def add(self, what: str, seconds: float) -> None:
        """Count seconds that have passed since the last step. Every rank calls it alike."""
        self.last = what
        self.seconds[what] = self.seconds.get(what, 0.0) + seconds

    def meet(self) -> None:
        """Wait until all ranks have done what is beside the steps. Collective if something was done, else nothing."""
        if self.last:
            with self.doing(self.last):
                self.world.all_agree(True)
            self.last = ""

    def take(self) -> Mapping[str, float]:
        """The seconds since the last call, by what was done."""
        found, self.seconds = self.seconds, {}
        return found
