"""In: a clock, seconds of work. Out: a processor of one core or more that threads share equally.
Does not know what it computes (rank_verbs.py does)."""

from __future__ import annotations

import heapq

from codescent.cost.events import Clock, Event, Process


class Processor:
    """The processor of a rank, or of several. Arithmetic, and the coding of messages in threads beside it, share it.

    Of k threads each gets 1/k of it (processor sharing; Kleinrock 1967, "Time-shared systems: a theoretical
    treatment"), and one core at most. The virtual time is what each thread has got since the processor was idle.
    """

    def __init__(self, clock: Clock, cores: float = 1.0) -> None:
        self.clock, self.cores = clock, cores
        self.virtual_s = self.looked_s = 0.0
        self.jobs: list[tuple[float, int, Event]] = []  # virtual time of the end, number, end
        self.number = 0  # of jobs so far, and of ends

    def work(self, seconds: float) -> Process:
        """Compute what takes so long where nothing else runs."""
        if seconds:
            self._look()
            done = Event()
            heapq.heappush(self.jobs, (self.virtual_s + seconds, self.number, done))
            self.clock.start(self._end_next())
            yield done

    def _look(self) -> None:
        """Bring the virtual time up to now."""
        if self.jobs:
            self.virtual_s += (self.clock.now_s - self.looked_s) * self._rate()
        else:
            self.virtual_s = 0.0
        self.looked_s = self.clock.now_s

    def _end_next(self) -> Process:
        """End the job with the least left, unless something changes before."""
        self.number += 1
        number = self.number
        if not self.jobs:
            return
        yield max(0.0, (self.jobs[0][0] - self.virtual_s) / self._rate())
        if number != self.number:
            return
        self._look()
        _, _, done = heapq.heappop(self.jobs)
        self.clock.happens(done)
        self.clock.start(self._end_next())

    def _rate(self) -> float:
        """The part of a core that each thread gets."""
        return min(1.0, self.cores / len(self.jobs))
