"""In: the parts of each step on this rank. Out: on rank 0, their means over some steps on every rank, with its memory.
Does not measure a step (execute.py does) and does not write a file (record/ranks.py does)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from codescent.base.agreement import gather_numbers
from codescent.base.progress import OwnPage
from codescent.record.ranks import PARTS, RankRow
from codescent.train.result import WAIT_COLUMN


class RankTimes:
    """Sums the parts of this rank's steps, until `gather` sends them to rank 0."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self.steps = 0
        self.sums = dict.fromkeys(("step_s", *PARTS), 0.0)

    def add(self, step_s: float, parts: Mapping[str, float]) -> None:
        """Add a step: its wall time and its parts, in seconds."""
        self.steps += 1
        self.sums["step_s"] += step_s
        for name in PARTS:
            self.sums[name] += parts[name]
        if OwnPage.current is not None:  # the launcher compares the ranks
            OwnPage.current.took(parts["data_s"], step_s - parts["data_s"] - parts[WAIT_COLUMN])

    def gather(
        self, step: int, peak_memory_bytes: int, memory: Sequence[float] = (), living: Sequence[int] | None = None
    ) -> tuple[list[RankRow], list[list[float]]]:
        """On rank 0, of each rank: a row of record/ranks.py, and `memory`. On other ranks nothing. Starts new sums.

        One collective of some numbers.

        Args:
            step: the last step that was added.
            peak_memory_bytes: of this rank.
            memory: more numbers of this rank, equally many on each.
            living: the ranks that take part; None: all.
        """
        means = {name: total / self.steps for name, total in self.sums.items()}
        numbers = [*means.values(), float(peak_memory_bytes), float(self.steps)]  # a rank may have fewer, larger steps
        self._begin()
        everyone = gather_numbers([*numbers, *memory])
        rows: list[RankRow] = [
            {
                "step": step,
                "rank": rank,
                "steps": int(found[len(means) + 1]),
                **dict(zip(means, found, strict=False)),
                "peak_memory_bytes": int(found[len(means)]),
            }
            for rank, found in zip(living or range(len(everyone)), everyone, strict=False)
        ]
        return rows, [found[len(numbers) :] for found in everyone]
