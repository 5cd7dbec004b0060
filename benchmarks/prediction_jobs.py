"""In: rows of whole jobs with different numbers of steps. Out: the start-up that they share, and the jobs predicted so.
Prices no plan: a job takes steps x seconds of a step + its start-up, and two jobs say both."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

MINUTE_S = 60.0
WITHOUT_START = "train_runtime only"
"""Notes of rows whose minutes have no start-up."""
LEAST = 2
"""So many jobs decide the seconds of a step and the start-up."""


@dataclass(frozen=True)
class Jobs:
    """Jobs of one program on different numbers of devices, each of which takes the same step.

    Attributes:
        group, sharding: what they have in common. `sharding`: "zero 0" for replicas.
        step_s, start_s: of the first two jobs.
        predicted: of each further job: its name, predicted and measured seconds.
    """

    group: str
    sharding: str
    step_s: float
    start_s: float
    predicted: tuple[tuple[str, float, float], ...]

    @property
    def inconsistent(self) -> str:
        """Why no step and no start-up explain the first two jobs; "": they do."""
        if self.start_s < 0:
            return f"their start-up would be {self.start_s:.0f} s: the one with half of the steps took less than half"
        return "a step would take no time" if self.step_s <= 0 else ""


def jobs(rows: Sequence[dict[str, Any]]) -> Iterator[Jobs]:
    """The jobs of a file that have minutes, steps and as many samples on each device, by group and sharding."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        measured = row.get("measured", {})
        if measured.get("job_minutes") and measured.get("steps") and WITHOUT_START not in row.get("notes", ""):
            found[row["group"], f"zero {row['layout']['zero']}"].append(row)
    for (group, sharding), several in found.items():
        if len(several) >= LEAST:
            yield _of(group, sharding, sorted(several, key=lambda row: row["measured"]["steps"], reverse=True))


def _of(group: str, sharding: str, rows: Sequence[dict[str, Any]]) -> Jobs:
    (steps, first_s), (fewer, second_s), *_ = [
        (row["measured"]["steps"], MINUTE_S * row["measured"]["job_minutes"]) for row in rows
    ]
    step_s = (first_s - second_s) / (steps - fewer)
    start_s = first_s - steps * step_s
    others = (
        (row["id"], row["measured"]["steps"] * step_s + start_s, MINUTE_S * row["measured"]["job_minutes"])
        for row in rows[LEAST:]
    )
    return Jobs(group, sharding, step_s, start_s, tuple(others))
