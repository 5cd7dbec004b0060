"""In: the checkpoints of a run. Out: the one to resume from, the same on every rank.
Does not load tensors (open.py does)."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from codescent.base.output import warn
from codescent.checkpoint.checkpoints import Checkpoints, Saved
from codescent.checkpoint.fall_back import SetAside, newest_sound
from codescent.record import RunFolder
from codescent.train.world import World


def newest(
    checkpoints: Checkpoints, world: World, before: int | None, folder: RunFolder | None, *, falls_back: bool
) -> Saved | None:
    """The newest checkpoint that rank 0 finds, on every rank, so that all ranks load the same one.

    Args:
        checkpoints: of the run.
        world: of this rank.
        before: only those of earlier steps; None: all.
        folder: of the run, on rank 0.
        falls_back: damaged ones are set aside. Else the loading refuses them.
    """
    if falls_back:
        return newest_sound(checkpoints, before, lambda aside: _tell(aside, folder))

    def look() -> dict[str, Any] | None:
        saved = checkpoints.latest(before)
        return None if saved is None else {**dataclasses.asdict(saved), "path": str(saved.path)}

    found = world.from_first(look)
    return None if found is None else Saved(**{**found, "path": Path(found["path"])})


def _tell(aside: SetAside, folder: RunFolder | None) -> None:
    """Say and record that a checkpoint was set aside, on rank 0."""
    if folder is not None:
        folder.event("checkpoint_set_aside", **dataclasses.asdict(aside))
    warn(
        f"{aside.path}: damaged: {'; '.join(aside.problems)}; it is kept as {Path(aside.kept_as).name}, and the run "
        "goes back to the checkpoint before it"
    )
