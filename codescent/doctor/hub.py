"""In: the ranks that have come, requests by rank. Out: their answers; which ranks were lost meanwhile.
Does not know what a request means (tasks.py does). Requests and answers are values of rank 0's store."""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

from codescent.doctor.meeting import Gathered
from codescent.meeting.store import Store, StoreError

ANSWER_S = 60.0
"""A rank that has not answered by then is lost."""
IDLE = timedelta(hours=1)
"""So long a rank waits for a request: others are asked meanwhile."""
END_S = 5.0
"""So long rank 0 waits until a rank knows that the checks have ended. The store ends with rank 0."""
LOOK_S = 1.0
"""Seconds between two looks whether a rank that has not answered is still there."""
END, FAILED = "end", "failed"

Request = Mapping[str, Any]
Handler = Callable[[Request], Any]


class Hub:
    """Asks ranks, all at the same time. Rank 0 answers itself.

    Attributes:
        lost: why a rank answers no more, by rank.
        failed: requests that a rank could not do: its number, the request, why.
    """

    def __init__(self, found: Gathered, own: Handler) -> None:
        self._found, self._own = found, own
        self._asked = Counter[int]()
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
            answer = self._own(request) if rank == 0 else self._answer(rank, request, within_s)
        except OSError as error:
            self.lost[rank] = error.strerror or str(error)
            return None
        if isinstance(answer, dict) and FAILED in answer:
            self.failed.append((rank, request["do"], answer[FAILED]))
            return None
        return answer

    def _answer(self, rank: int, request: Request, within_s: float) -> Any:
        """Ask another rank. Raises OSError: it has gone, or does not answer in time."""
        store = self._found.store
        assert store is not None, "several ranks have a store"
        self._asked[rank] += 1
        store.set(_asked(rank, self._asked[rank]), json.dumps(dict(request)))
        key, end_s = _answered(rank, self._asked[rank]), time.monotonic() + within_s
        while True:
            try:
                return json.loads(store.waited([key], timedelta(seconds=min(LOOK_S, within_s)))[0])
            except StoreError as error:
                if rank in self._found.lost:
                    raise ConnectionError(self._found.lost[rank]) from error
                if time.monotonic() > end_s:
                    raise TimeoutError("timed out") from error

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
        self.ask({rank: {"do": END} for rank in self._found.facts if rank and rank not in self.lost}, END_S)


def serve(store: Store, rank: int, handler: Handler) -> bool:
    """Answer the requests of rank 0 until it says that it has ended. Returns False if it has gone before."""
    for number in itertools.count(1):
        try:
            request = json.loads(store.waited([_asked(rank, number)], IDLE)[0])
            ends = request["do"] == END
            store.set(_answered(rank, number), json.dumps(None if ends else handler(request)))
        except StoreError:
            break
        if ends:
            return True
    return False


def _asked(rank: int, number: int) -> str:
    return f"request {number} of rank {rank}"


def _answered(rank: int, number: int) -> str:
    return f"answer {number} of rank {rank}"
