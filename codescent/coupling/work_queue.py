"""In: ranks that ask for work and finish it, in any order. Out: their portions, and what a complete step sums to.
Does not decide when a rank is answered (server_requests.py and coordinate.py do) and computes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from codescent.coupling.pushes import Step
from codescent.servers import Portion, Portions

MOST_TOLD = 300
"""Most steps of which an answer has the sums: the metadata of a frame is bounded."""


class WorkQueue:
    """Gives out the portions of a segment's steps, and counts those that are done. The caller locks.

    The first server has one, and so has rank 0 of asynchronous gossip. Another server counts the same steps with one
    that gives out nothing: it has no segment.

    Args:
        workers: ranks that compute, and portions of a step.
        first_step: number of complete steps when the command begins.
        own, period: see Portions.

    Attributes:
        count: portions that are done, since the run began.
        step: what the portions of the present step say.
        sums: of the last complete step.
        unread: sums of the steps of which rank 0 has not heard.
        stopping: a rank was asked to stop. The segment ends with the last step of which a portion was given out.
    """

    def __init__(self, workers: int, first_step: int, *, own: bool = False, period: int = 1) -> None:
        self.workers, self.period, self._own = workers, period, own
        self.count = first_step // period * workers
        self.step, self.sums = Step(), list[float]()
        self.unread: list[list[float]] = []
        self.stopping = False
        self._portions: Portions | None = None

    def begin(self, first: int, end: int) -> None:
        """A segment: the steps `first` to `end` - 1."""
        self._portions = Portions(self.workers, first, end, own=self._own, period=self.period)

    @property
    def done(self) -> int:
        """The number of complete steps."""
        return self.count // self.workers * self.period

    @property
    def ends(self) -> bool:
        """Whether all steps of the segment are complete, or there is no segment."""
        return self._portions is None or (self._portions.finished and self.done == self._portions.end)

    @property
    def has_stopped(self) -> bool:
        """Whether a rank was asked to stop, and all work that was given out is done."""
        return self.stopping and self.ends

    @property
    def held(self) -> Mapping[int, Portion]:
        """The portions being computed, by worker."""
        return {} if self._portions is None else self._portions.held

    def position(self, worker: int) -> int:
        """The step that a worker computes; if it computes nothing, the number of complete steps."""
        held = self.held
        return held[worker].step if worker in held else self.done

    # --- a worker comes, takes a portion, and finishes it or leaves

    def returned(self, worker: int) -> None:
        """See Portions."""
        if self._portions is not None:
            self._portions.returned(worker)

    def must_wait(self, worker: int) -> bool:
        """Whether a worker has to wait for others: the segment is not over, and there is no portion for it."""
        portions = self._portions
        return portions is not None and not (portions.finished or portions.offers(worker))

    def weights_given(self, worker: int) -> None:
        """The worker has weights: from now on it may take portions."""
        if self._portions is not None:
            self._portions.weights_given(worker)

    def needs_weights(self, worker: int) -> bool:
        """Whether there is work, and the worker has no weights for it yet."""
        return not self.ends and self._portions is not None and not self._portions.is_ready(worker)

    def take(self, worker: int) -> Portion | None:
        """A portion for a worker that has weights; the same one again until it is done. None: all are given out."""
        return None if self.ends or self._portions is None else self._portions.take(worker)

    def holds(self, worker: int, portion: Portion) -> bool:
        """Whether this portion is this worker's."""
        return self._portions is not None and self._portions.holds(worker, portion)

    def finish(self, worker: int, portion: Portion) -> None:
        """A portion is done."""
        self.count += 1
        if self._portions is not None:
            self._portions.done(worker, portion)

    def leave(self, worker: int) -> None:
        """The worker has died, or is not connected: what it holds is given again."""
        if self._portions is not None:
            self._portions.leave(worker)

    # --- a step ends, or all of them

    def complete_step(self) -> None:
        """Sum up the step, if all its portions are done. Who gives out the work keeps the sums for rank 0."""
        if self.count % self.workers == 0:
            self.sums, self.step = self.step.sums, Step()
            if self._portions is not None:
                self.unread.append(self.sums)

    def drop_open(self) -> None:
        """The step ends without its portions that are not done: they came too late."""
        assert self._portions is not None
        dropped = len(self._portions.drop_open())
        self.count += dropped
        self.step.late += dropped

    def stop(self) -> None:
        """End with the last step of which a portion was given out. Who gives out nothing goes on."""
        if self._portions is not None and not self.stopping:
            self.stopping = True
            self._portions.end_after_given()

    # --- what a worker is told

    def is_known(self, known: int) -> bool:
        """Whether the segment is over, and a worker that knows of so many steps knows it: it waits for the next one."""
        return self.ends and known == self.done

    def facts(self, worker: int, known: int, portion: Portion | None) -> dict[str, Any]:
        """What a worker is told that knows of `known` complete steps: its portion, and what has become complete.

        Rank 0 writes the metrics, so it is told of each step.
        """
        facts: dict[str, Any] = {"done": self.done, "ends": self.ends, "stopped": self.stopping}
        unknown = self.done - known
        if worker == 0:
            del self.unread[: max(0, len(self.unread) - unknown // self.period)]
        facts["sums"] = (self.unread[-MOST_TOLD:] if worker == 0 else [self.sums]) if unknown else []
        if portion is not None:
            facts["portion"] = [portion.step, portion.part]
        return facts
