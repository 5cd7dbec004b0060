"""In: the store of a run. Out: what all ranks agreed on before the first step, for a rank that comes late.
Does not agree on anything (base/agreement.py does) and does not let a rank in (late.py does)."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TypeVar

from codescent.meeting.store import Store

T = TypeVar("T")


class StoredPast:
    """What all ranks agreed on before the first step, in order (base/agreement.Past). Rank 0 puts it into the store. A
    rank that comes late takes the same way to its first step, and reads there what the others agreed on."""

    def __init__(self, store: Store, *, is_late: bool) -> None:
        self._store, self._is_late = store, is_late
        self._number, self._over = 0, False

    @property
    def is_read(self) -> bool:
        """Whether this rank reads."""
        return self._is_late and not self._over

    def kept(self, make: Callable[[], T]) -> T:
        """See Past."""
        if self._over:
            return make()
        key, self._number = f"past {self._number}", self._number + 1
        if self._is_late:
            found: T = json.loads(self._store.get(key))
            return found
        value = make()
        self._store.set(key, json.dumps(value))
        return value

    def end(self) -> None:
        """The first step begins: from now on all ranks that are there agree together."""
        self._over = True
