"""In: requests of workers that a server cannot answer yet. Out: an error that names the workers for which others wait.
Does not end a worker and does not take its work away: what comes late within the limit counts."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping

from codescent.base.errors import RunFailed
from codescent.servers import Portion

SHARE = 0.9
"""Share of parallel.timeout_s after which the server names who is late: a worker that gives up blames the server."""


class Patience:
    """Whose requests wait at the first server, and since when. The caller locks.

    Args:
        timeout_s: how long a worker waits for an answer.
        nothing: what the late ones have not done, in words.
    """

    def __init__(self, timeout_s: float = math.inf, nothing: str = "pushed nothing") -> None:
        self.timeout_s, self._nothing = timeout_s, nothing
        self._waiting: dict[int, tuple[object, float]] = {}  # by worker: which request, and since when
        self._begun_s = 0.0

    def begin(self) -> None:
        """A step begins. What waited before did not wait for a worker: all ranks may have validated and saved."""
        self._begun_s = time.monotonic()

    def note(self, worker: int, request: object, *, waits: bool) -> None:
        """A request of a worker has to wait, or is answered, or has gone with its connection.

        It is asked about again and again. A lost connection makes the same one come again.
        """
        if not waits:
            self._waiting.pop(worker, None)
        elif self._waiting.get(worker, (None, 0.0))[0] != request:
            self._waiting[worker] = request, time.monotonic()

    def check(self, held: Mapping[int, Portion], workers: Collection[int]) -> None:
        """Raise RunFailed if a worker has waited too long. It names those that compute, else those that do not wait.

        Args:
            held: the portions that are computed, by worker.
            workers: those that live.
        """
        since = [max(since_s, self._begun_s) for since_s in (one for _, one in self._waiting.values())]
        if not since or (waited_s := time.monotonic() - min(since)) < SHARE * self.timeout_s:
            return
        holders = [worker for worker in held if worker not in self._waiting]
        late = sorted(holders or (worker for worker in workers if worker not in self._waiting))
        if not late:
            return
        where = {worker: f" (in step {held[worker].step + 1})" if worker in held else "" for worker in late}
        ranks = ", ".join(f"rank {worker}{where[worker]}" for worker in late)
        others = ", ".join(f"rank {worker}" for worker in sorted(self._waiting))
        raise RunFailed(
            f"{ranks} {self._nothing} for {waited_s:.1f} s (parallel.timeout_s), and {others} waited for it"
        )
