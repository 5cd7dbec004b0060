"""In: the ranks that have come, requests by rank. Out: their answers; which ranks were lost meanwhile.
Does not know what a request means (tasks.py does). Requests and answers are values of rank 0's store."""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Any

from codescent.doctor.roll import Gathered
from codescent.meeting.store import NotSet, Store, StoreError

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
        asked = {rank: request for rank, request in requests.items() if rank not in self.lost}
        others = {rank: request for rank, request in asked.items() if rank}
        with ThreadPoolExecutor(1) as pool:
            own = pool.submit(self._own, asked[0]) if 0 in asked else None
            found = self._of_others(others, within_s)
            if own is not None:
                found[0] = self._unless_lost(0, own.result)
        for rank, answer in list(found.items()):
            if isinstance(answer, dict) and FAILED in answer:
                self.failed.append((rank, asked[rank]["do"], found.pop(rank)[FAILED]))
        return {rank: found[rank] for rank in asked if found.get(rank) is not None}

    def _unless_lost(self, rank: int, answer: Callable[[], Any]) -> Any:
        try:
            return answer()
        except (OSError, StoreError) as error:
            self.lost[rank] = getattr(error, "strerror", None) or str(error)
            return None

    def _of_others(self, requests: Mapping[int, Request], within_s: float) -> dict[int, Any]:
        """Write all requests into the store, and wait until each rank has answered, has gone, or is too late."""
        if not requests:
            return {}
        store, end_s = self._found.meeting.store, time.monotonic() + within_s
        for rank, request in requests.items():
            self._asked[rank] += 1
            store.set(_asked(rank, self._asked[rank]), json.dumps(dict(request)))
        keys = {rank: _answered(rank, self._asked[rank]) for rank in requests}
        while keys:
            try:
                answers = store.waited([*keys.values()], timedelta(seconds=min(LOOK_S, within_s)))
                return dict(zip(keys, map(json.loads, answers), strict=True))
            except NotSet:
                keys = self._still_asked(store, keys, is_over=time.monotonic() > end_s)
        return {}

    def _still_asked(self, store: Store, keys: dict[int, str], *, is_over: bool) -> dict[int, str]:
        """The ranks that have answered, or may yet answer. The others are lost."""
        there = dict(zip(keys, store.there([*keys.values()]), strict=True))
        gone = {rank: self._found.lost.get(rank, "timed out") for rank in keys if is_over or rank in self._found.lost}
        self.lost |= {rank: why for rank, why in gone.items() if not there[rank]}
        return {rank: key for rank, key in keys.items() if rank not in self.lost}

    def end(self) -> None:
        """Let all ranks go."""
        with suppress(StoreError):
            self.ask({rank: {"do": END} for rank in self._found.facts if rank}, END_S)


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
