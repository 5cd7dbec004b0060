"""In: the events of a run. Out: which batches its steps take after rollbacks, and which checkpoints still count.
Does not go back (rollback.py does)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from codescent.checkpoint.checkpoints import Saved
from codescent.data.order import Ahead

ROLLBACK = "rollback"
"""The kind of the event."""


def after_rollback(ahead: Ahead, to: int, number: int) -> list[tuple[int, int]]:
    """What is left out after a rollback to step `to`: later steps take batches that come `number` later."""
    return [*((step, before) for step, before in ahead if step < to), (to, number)]


def ahead_of(events: Iterable[Mapping[str, Any]]) -> list[tuple[int, int]]:
    """What the rollbacks of a run have left out, from its events in order."""
    ahead: list[tuple[int, int]] = []
    for event in events:
        if event["kind"] == ROLLBACK:
            ahead = after_rollback(ahead, event["to"], event["ahead"])
    return ahead


def is_of_before(saved: Saved, ahead: Ahead) -> bool:
    """Whether a checkpoint is of steps that the last rollback has undone. A kill can leave it."""
    return bool(ahead) and saved.step > ahead[-1][0] and saved.state.get("ahead", 0) != ahead[-1][1]
