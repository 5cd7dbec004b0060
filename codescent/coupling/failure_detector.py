"""In: connections and requests of workers, seen by the rank that gives out work. Out: who is dead, who stalls.
Sees no process end (launch/local.py does, on its machine) and gives out no work again (parameter_server.py does)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from codescent.base.errors import RunFailed
from codescent.coupling.membership import Death
from codescent.servers import Portion
from codescent.transport import Refused

SHARE = 0.9
"""Share of parallel.timeout_s after which the server names who is late: a worker that gives up blames the server."""
CLOSED_S = 3.0
"""Seconds after which a worker is dead whose connection was closed by its machine. One that lives looks at its
connection each second, and connects again (transport/client.py). So a death is noticed within 5 s."""
SILENT_S = 60.0
"""Seconds after which a worker is dead whose machine is silent. A switch may forward nothing for 50 s after a change of
its neighbours (spanning tree, IEEE 802.1D: 20 s until it is noticed, then twice 15 s)."""
OF_TIMEOUT = 0.5
"""Neither is more than this share of parallel.timeout_s: the others may wait in the meeting meanwhile."""


@dataclass(frozen=True)
class _Loss:
    """A connection that was lost: when, how many steps were done then, and whether the worker's machine was silent."""

    moment_s: float
    position: float
    silent: bool


class FailureDetector:
    """Which workers are not connected, seen by the rank that gives out work. The caller locks.

    Args:
        timeout_s: parallel.timeout_s.
        goes_on: whether the run goes on without a worker. Otherwise it waits nearly as long as its timeout.
    """

    def __init__(self, timeout_s: float, *, goes_on: bool) -> None:
        most_s = OF_TIMEOUT * timeout_s
        silent_s = min(SILENT_S, most_s) if goes_on else SHARE * timeout_s
        self.limits_s = {False: min(CLOSED_S, most_s), True: silent_s}
        """Seconds without a connection after which a worker is dead; True: its machine was silent."""
        self.connected: Callable[[], Collection[int]] = tuple
        self._hosts: dict[int, str] = {}
        self._losses: dict[int, _Loss] = {}
        self._dead: dict[int, Death] = {}

    def met(self, worker: int, host: str) -> None:
        """A worker connects. Raises Refused: it was taken for dead, and its work was given to others."""
        if worker in self._dead:
            raise Refused(f"the others have gone on without rank {worker}, which {self.how(worker)}")
        self._hosts[worker] = host
        self._losses.pop(worker, None)

    def left(self, worker: int, position: float, *, silent: bool) -> None:
        """The connection of a worker was lost, after so many steps."""
        if worker not in self._dead:
            self._losses[worker] = _Loss(time.monotonic(), position, silent)

    def deaths(self) -> dict[int, Death]:
        """The workers that are dead. None of them comes again."""
        now_s, connected = time.monotonic(), self.connected()
        for worker, loss in list(self._losses.items()):
            if worker in connected:  # its new connection was greeted before the end of the old one was noticed
                del self._losses[worker]
            elif now_s - loss.moment_s > self.limits_s[loss.silent]:
                self._dead[worker] = Death(loss.moment_s, loss.position, self._hosts[worker])
        return dict(self._dead)

    def how(self, worker: int) -> str:
        """How a dead worker was lost, in words that follow its name."""
        loss, death = self._losses[worker], self._dead[worker]
        what = "was silent" if loss.silent else "was not connected"
        return f"{what} for {self.limits_s[loss.silent]:g} s (on {death.host}, in step {int(loss.position) + 1})"


class StallTimeout:
    """Whose requests wait at the rank that gives out work, and since when. The caller locks.

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
