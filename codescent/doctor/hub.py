"""In: the ranks that have come, requests by rank. Out: their answers; which ranks were lost meanwhile.
Does not know what a request means (tasks.py does)."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from codescent.doctor.messages import receive, send

ANSWER_S = 60.0
"""A rank that has not answered by then is lost."""
IDLE_S = 3_600.0
"""So long a rank waits for a request: others are asked meanwhile."""
END, FAILED = "end", "failed"

Request = Mapping[str, Any]
Handler = Callable[[Request], Any]


class Hub:
    """Asks ranks, all at the same time. Rank 0 answers itself.

    Attributes:
        lost: why a rank answers no more, by rank.
        failed: requests that a rank could not do: its number, the request, why.
    """

    def __init__(self, connections: Mapping[int, socket.socket], own: Handler) -> None:
        self._connections, self._own = dict(connections), own
        self.lost: dict[int, str] = {}
        self.failed: list[tuple[int, str, str]] = []

    def ask(self, requests: Mapping[int, Request], within_s: float = ANSWER_S) -> dict[int, Any]:
        """The answers of the ranks that have one. A request that fails on a rank has no answer."""
        if not requests:
            return {}
        with ThreadPoolExecutor(len(requests)) as pool:
            futures = {rank: pool.submit(self._one, rank, request, within_s) for rank, request in requests.items()}
        found = {rank: future.result() for rank, future in futures.items()}
        return {rank: answer for rank, answer in found.items() if answer is not None}

    def _one(self, rank: int, request: Request, within_s: float) -> Any:
        if rank in self.lost:
            return None
        try:
            if rank == 0:
                answer = self._own(request)
            else:
                send(self._connections[rank], dict(request))
                answer = receive(self._connections[rank], within_s)
        except OSError as error:
            self.lost[rank] = error.strerror or str(error)
            return None
        if isinstance(answer, dict) and FAILED in answer:
            self.failed.append((rank, request["do"], answer[FAILED]))
            return None
        return answer

    def clock(self, rank: int) -> tuple[float, float] | None:
        """How many seconds the clock of a rank is ahead of that of rank 0, and the uncertainty; None: no answer."""
        best: tuple[float, float] | None = None
        for _ in range(5):
            begin, begin_s = time.time(), time.monotonic()
            answers = self.ask({rank: {"do": "clock"}}, 10.0)
            took_s = time.monotonic() - begin_s
            if rank in answers and (best is None or took_s / 2 < best[1]):
                best = (answers[rank] - (begin + took_s / 2), took_s / 2)
        return best

    def end(self) -> None:
        """Let all ranks go."""
        for rank, peer in self._connections.items():
            if rank not in self.lost:
                try:
                    send(peer, {"do": END})
                except OSError as error:
                    self.lost[rank] = str(error)
            peer.close()


def serve(peer: socket.socket, handler: Handler) -> bool:
    """Answer the requests of rank 0 until it says that it has ended. Returns False if it has gone before."""
    while True:
        try:
            request = receive(peer, IDLE_S)
            if request["do"] == END:
                return True
            send(peer, handler(request))
        except OSError:
            return False
