"""In: prompts with answers that a run's model has written, and their rewards. Out: answers.jsonl of a run folder.
Does not choose what is kept (train/kept_answers.py does)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from codescent.record.lines import append, cut_later
from codescent.record.rows import json_line

ANSWERS_JSONL = "answers.jsonl"


def write(folder: Path, row: Mapping[str, Any]) -> None:
    """Append a row, which has the key "step". Raises UserError: the file cannot be written."""
    append(folder / ANSWERS_JSONL, json_line(row))


def rewind(folder: Path, step: int) -> None:
    """Delete the rows of all steps after `step`. Raises UserError: the file cannot be written."""

    def is_later(line: bytes) -> bool:
        try:
            return not json.loads(line)["step"] <= step
        except (ValueError, TypeError, KeyError, RecursionError):  # no row: what a fault has left
            return True

    cut_later(folder / ANSWERS_JSONL, is_later)
