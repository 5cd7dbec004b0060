"""In: pushes that the first server has applied. Out: the other servers ask for them, and hear of them in order.
Does not apply pushes (parameter_server.py does)."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from codescent.servers import Decided
from codescent.transport import Answer, Client, Frame, Kind

if TYPE_CHECKING:
    from codescent.coupling.parameter_server import WeightServer

MOST_DECIDED = 2000
"""Most pushes of which an answer tells."""
IDLE_S = 1.0
"""Seconds after which a server is answered, although no push was applied: it asks again."""


class Followers:
    """The other servers, as the first one knows them. The caller locks.

    Args:
        pushes: that were applied before.
        senders: numbers of the other servers in their requests.
    """

    def __init__(self, pushes: int, senders: Sequence[int]) -> None:
        self.decided = Decided(pushes, senders)
        self.told = pushes
        """Pushes of which some server was told."""
        self._asked: dict[int, tuple[int, float]] = {}  # by server: the request that waits, and since when

    def answer(self, request: Frame, version: int) -> Answer | None:
        """Which pushes the first server has applied: another server applies the same, in the same order."""
        found = self.decided.after(request.sender, request.metadata["after"])[:MOST_DECIDED]
        number, since = self._asked.get(request.sender, (-1, 0.0))
        if number != request.request:
            self._asked[request.sender] = request.request, (since := time.monotonic())
        is_idle = not found and time.monotonic() - since < IDLE_S
        self.told = max(self.told, request.metadata["after"] + len(found))
        return None if is_idle else Answer(version, {"pushes": found})


def follow(server: WeightServer, first: Client) -> None:
    """Ask the first server for its decisions, in a thread, until `server` is closed.

    Args:
        server: of this process.
        first: a client of the first server, of this thread alone.
    """
    threading.Thread(target=_follow, args=(server, first), name="codescent follows", daemon=True).start()


def _follow(server: WeightServer, first: Client) -> None:
    after = server.queue.count
    try:
        while not server.closed:
            applied = first.request(Kind.ASK, metadata={"after": after}).metadata["pushes"]
            after += len(applied)
            with server.change:
                server.to_apply += [(worker, number) for worker, number in applied]
                server.change.notify_all()
    except BaseException as error:
        if not server.closed:
            with server.change:
                server.failure = error  # SERVE raises it
                server.change.notify_all()
    finally:
        first.close()
