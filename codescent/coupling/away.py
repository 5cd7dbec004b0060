"""In: connections of workers at the first server that end, and are made again. Out: the workers that it takes for dead.
Sees no process end (launch/local.py does, on its machine) and gives out no work again (parameter_server.py does)."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from codescent.coupling.crew import Death
from codescent.coupling.patience import SHARE
from codescent.transport import Refused

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


class Away:
    """Which workers are not connected, as the first server knows it. The caller locks.

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
