"""In: a short text of each rank under the same name. Out: on rank 0, the texts of all ranks, once all are there.
Makes no collective and waits for no rank: one may be late, or have nothing to say."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import ClassVar

from codescent.base.rank import Rank
from codescent.meeting.store import Store

MOST_AWAITED = 16
"""Rank 0 waits for so many names at a time. It then forgets the oldest one."""

Judge = Callable[[list[str]], None]


class Compared:
    """Facts about one module that the ranks write to the store. Rank 0 judges them at its next look."""

    count: ClassVar[int] = 0  # of these objects in this process: every rank creates the same ones

    def __init__(self, store: Store, this_rank: Rank) -> None:
        Compared.count += 1
        self._key, self._store, self._rank = f"codescent_compared {self.count}", store, this_rank
        self._awaited: dict[str, Judge] = {}

    def put(self, name: str, text: str, judge: Judge) -> None:
        """Write this rank's text. Rank 0 calls `judge` with the texts of all ranks, in rank order."""
        with suppress(RuntimeError):  # rank 0, which serves the store, has ended
            self._store.set(self._keys(name)[self._rank.rank], text)
        if self._rank.rank == 0:
            self._awaited[name] = judge
            if len(self._awaited) > MOST_AWAITED:
                del self._awaited[next(iter(self._awaited))]

    def look(self) -> None:
        """Judge what all ranks have written."""
        for name, judge in list(self._awaited.items()):
            with suppress(RuntimeError):
                if self._store.check(self._keys(name)):
                    del self._awaited[name]
                    judge([text.decode() for text in self._store.multi_get(self._keys(name))])

    def close(self) -> None:
        """Look for the last time."""
        self.look()
        self._awaited.clear()

    def _keys(self, name: str) -> list[str]:
        return [f"{self._key} {name} {rank}" for rank in range(self._rank.world_size)]
