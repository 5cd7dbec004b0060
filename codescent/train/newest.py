"""In: the checkpoints of a run. Out: the one to resume from, the same on every rank.
Does not load tensors (open.py does)."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from codescent.checkpoint.checkpoints import Checkpoints, Saved
from codescent.train.world import World


def newest(checkpoints: Checkpoints, world: World, before: int | None) -> Saved | None:
    """The newest checkpoint that rank 0 finds, on every rank, so that all ranks load the same one.

    `before`: only those of earlier steps; None: all.
    """

    def look() -> dict[str, Any] | None:
        saved = checkpoints.latest(before)
        return None if saved is None else {**dataclasses.asdict(saved), "path": str(saved.path)}

    found = world.from_first(look)
    return None if found is None else Saved(**{**found, "path": Path(found["path"])})
