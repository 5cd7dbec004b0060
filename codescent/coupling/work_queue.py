"""In: portions of work as they are done. Out: who computes which portion, what the steps sum to, what a rank is told.
Does not apply what a rank has computed: a server (parameter_server.py) or each replica (pairs.py) does."""

from __future__ import annotations

from typing import Any

from codescent.coupling.pushes import Step
from codescent.servers import Portion, Portions

MOST_TOLD = 300
"""Most steps of which an answer has the sums: the metadata of a frame is bounded."""


class WorkQueue:
    """The portions of a segment's steps, and the sums of the steps, as the rank knows them that gives out work. A fast
    rank computes more portions than a slow one. The caller locks.

    Args:
        workers: number of ranks that compute, and of the portions of a step.
        first_step: number of complete steps when the command begins.
        period: steps of a portion.

    Attributes:
        count: portions that are done, of all steps.
        portions: of this segment; None: none has begun.
        step: what the portions of the present step say.
        sums: of the last complete step; empty: none was complete in this command.
        stopping: a rank was asked to stop.
    """

    def __init__(self, workers: int, first_step: int, period: int = 1) -> None:
        self.workers, self.period = workers, period
        self.count = first_step // period * workers
        self.portions: Portions | None = None
        self.step, self.stopping = Step(), False
        self.sums: list[float] = []
        self._unread: list[list[float]] = []  # of the steps that rank 0 has not been told of

    @property
    def done(self) -> int:
        """The number of complete steps."""
        return self.count // self.workers * self.period

    @property
    def ends(self) -> bool:
        """Whether this segment is over: all its steps are complete, or none has begun."""
        return self.portions is None or (self.portions.finished and self.done == self.portions.end)

    @property
    def has_stopped(self) -> bool:
        """Whether a rank was asked to stop, and all work that was given out is done."""
        return self.stopping and self.portions is not None and self.done == self.portions.end

    def begin(self, first: int, end: int, *, own: bool = False) -> Portions:
        """A segment: the steps `first` to `end` - 1. `own`: see Portions."""
        self.portions = Portions(self.workers, first, end, own=own, period=self.period)
        return self.portions

    def stop(self) -> None:
        """End with the last step of which a portion was given out. A server that gives out none is told by workers."""
        if self.portions is not None and not self.stopping:
            self.stopping = True
            self.portions.end_after_given()

    def at(self, worker: int) -> int:
        """The step that a worker computes; if it holds no portion, the number of complete steps."""
        held = {} if self.portions is None else self.portions.held
        return held[worker].step if worker in held else self.done

    def complete_step(self) -> None:
        """The last portion of the present step is done, and counted."""
        self.sums, self.step = self.step.sums, Step()
        if self.portions is not None:  # else nobody asks here: it is a server that follows the first one
            self._unread.append(self.sums)

    def facts(self, worker: int, known: int, portion: Portion | None) -> dict[str, Any]:
        """What a worker is told that asks for work.

        Args:
            worker: rank 0 writes the metrics, so it is told of each step; the others of the last one.
            known: the steps of which the worker knows that they are complete.
            portion: that it computes next; None: there is none.
        """
        facts: dict[str, Any] = {"done": self.done, "ends": self.ends, "stopped": self.stopping}
        unknown = self.done - known
        if worker == 0:
            del self._unread[: max(0, len(self._unread) - unknown // self.period)]
        facts["sums"] = (self._unread[-MOST_TOLD:] if worker == 0 else [self.sums]) if unknown else []
        if portion is not None:
            facts["portion"] = [portion.step, portion.part]
        return facts
