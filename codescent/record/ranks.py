"""In: the parts of a step and the memory of each rank, as means over some steps. Out: ranks.csv of a run folder.
Does not measure them (train/ranks.py does)."""

from __future__ import annotations

from collections.abc import Mapping

from codescent.record.table import Table

RANKS_CSV = "ranks.csv"
INTEGERS = ("step", "rank", "steps", "peak_memory_bytes")
PARTS = ("data_s", "forward_s", "backward_s", "exposed_comm_s", "optimizer_s", "other_s")
"""Columns that sum to step_s."""
COLUMNS = ("step", "rank", "steps", "step_s", *PARTS, "peak_memory_bytes")

RankRow = Mapping[str, float]

TABLE = Table(RANKS_CSV, COLUMNS, INTEGERS)
write, read, rewind = TABLE.write, TABLE.read, TABLE.rewind
