"""In: the memory of each rank by part, its peak and where it rose. Out: memory.csv of a run folder.
Does not count it (train/memory.py does). The bytes that the plan declares are in plan.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from codescent.record.table import Table

MEMORY_CSV = "memory.csv"
PARTS = ("weights_bytes", "gradients_bytes", "optimizer_bytes", "activations_bytes", "buffers_bytes")
"""What is counted. With rest_bytes these columns sum to peak_bytes."""
MOST = tuple(f"most_{part}" for part in PARTS)
WORDS = ("peak_at", "counted_at")
OF_CUDA = ("reserved_bytes", "allocator_retries")
"""Columns that are empty on a CPU."""
COLUMNS = (
    "step",
    "rank",
    "peak_bytes",
    "peak_step",
    "peak_at",
    *PARTS,
    "rest_bytes",
    "counted_at",
    *MOST,
    "host_bytes",
    *OF_CUDA,
)

MemoryRow = Mapping[str, Any]

TABLE = Table(MEMORY_CSV, COLUMNS, [name for name in COLUMNS if name not in WORDS], WORDS, OF_CUDA)


def last_rows(folder: Path) -> dict[int, MemoryRow]:
    """The last row of each rank, by rank: the state at the end, or before the run died. Raises UserError: damage."""
    return {row["rank"]: row for row in TABLE.read(folder)}


class Changes:
    """Writes rows only if a number of any rank has changed since the last rows."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.written: list[dict[str, Any]] = []

    def write(self, rows: Sequence[MemoryRow]) -> None:
        """Append a row for each rank, or none. Raises UserError: the file cannot be written."""
        now = [{name: value for name, value in row.items() if name != "step"} for row in rows]
        if now != self.written:
            TABLE.write(self.folder, rows)
            self.written = now
