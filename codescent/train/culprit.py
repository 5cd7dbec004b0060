"""In: the results of steps that were skipped. Out: the rank that alone gave what is not finite, in words with its host.
Does not find it: coupling/parameter_server.py and coordinate.py do, for ranks that send what they compute."""

from __future__ import annotations

import json

from codescent.meeting.store import Store
from codescent.train.result import StepResult


class Culprit:
    """Who gave what is not finite in all steps that were skipped in a row.

    Args:
        store: of all ranks, with the host of each.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.found: list[int] = []
        """One more than a rank; 0: several ranks, or an unknown one. Of each skipped step, equal ones once."""

    def note(self, result: StepResult) -> None:
        """A step is complete."""
        self.found = sorted({*self.found, result.culprit}) if result.skipped else []

    @property
    def words(self) -> str:
        """Such as "rank 2 (on node1)"; "": it was not the same one in all steps, or nobody knows."""
        return self.of(self.found[0]) if len(self.found) == 1 else ""

    def of(self, culprit: int) -> str:
        """The same for a step. `culprit`: see StepResult."""
        if not culprit:
            return ""
        host = json.loads(self._store.get(f"rank{culprit - 1}"))["host"]
        return f"rank {culprit - 1} (on {host})"
