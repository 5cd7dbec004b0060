"""In: the results of steps. Out: how many were skipped in a row, and the rank that alone gave what is not finite.
Does not find it: coupling/parameter_server.py and coordinate.py do, for ranks that send what they compute."""

from __future__ import annotations

import json

from codescent.meeting.store import Store
from codescent.train.result import StepResult

SKIPS_ALLOWED = 10
"""The run ends after this many consecutive steps whose loss or gradients are not finite. All ranks skip such steps."""


class Culprit:
    """Who gave what is not finite in all steps that were skipped in a row.

    Args:
        store: of all ranks, with the host of each.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.found: list[int] = []
        """One more than a rank; 0: several ranks, or an unknown one. Of each skipped step, equal ones once."""

    def note(self, result: StepResult, before: int, steps: int = 1) -> int:
        """A step is complete. Returns the number of skipped steps in a row.

        After SKIPS_ALLOWED of them the run ends, even if work that was given out before gives a finite step.

        Args:
            result: of the step.
            before: skipped steps in a row before it.
            steps: as many as it counts for, if it was skipped.
        """
        if result.skipped:
            self.found = sorted({*self.found, result.culprit})
            return before + steps
        if before < SKIPS_ALLOWED:
            self.found = []
            return 0
        return before

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
