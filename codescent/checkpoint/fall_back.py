"""In: the checkpoints of a run. Out: the newest one without damage; newer ones are set aside under another name.
Does not load tensors and does not delete anything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any

from codescent.base import writing
from codescent.base.agreement import from_first, rank
from codescent.checkpoint.checkpoints import CheckpointError, Checkpoints, Saved
from codescent.checkpoint.folders import by_step
from codescent.checkpoint.manifest import OtherFormat


@dataclass(frozen=True)
class SetAside:
    """A damaged checkpoint that was renamed: its step, its folder before and now, and what is wrong with it."""

    step: int
    path: str
    kept_as: str
    problems: list[str]


def newest_sound(checkpoints: Checkpoints, before: int | None, tell: Callable[[SetAside], object]) -> Saved | None:
    """The newest checkpoint whose files are all as they were written, the same on every rank. Collective.

    Args:
        checkpoints: of the run.
        before: only those of earlier steps; None: all.
        tell: is called on rank 0 with each checkpoint that was set aside.

    Returns None without any checkpoint.

    Raises CheckpointError on every rank: all are damaged, and the oldest stays in its place; or one has another format.
    """
    while (found := from_first(CheckpointError, lambda: _look(checkpoints, before))) is not None:
        step, problems = found["step"], found["problems"]
        if not problems:
            saved = Saved(**{**found["saved"], "path": Path(found["saved"]["path"])})
            if not (problems := checkpoints.damage(saved)):
                return saved
        aside = SetAside(**from_first(CheckpointError, partial(_set_aside, checkpoints, step, problems)))
        if rank() == 0:
            tell(aside)
    return None


def _look(checkpoints: Checkpoints, before: int | None) -> dict[str, Any] | None:
    """The newest checkpoint, or what is wrong with its manifest. None: there is none."""
    step = checkpoints.newest_step(before)
    try:
        saved = checkpoints.latest(before)
    except OtherFormat:  # not damaged: another version can read it
        raise
    except CheckpointError as error:
        return {"step": step, "problems": list(error.problems[:-1])}  # the last one is the way back
    if saved is None:
        return None
    return {"step": saved.step, "problems": [], "saved": {**asdict(saved), "path": str(saved.path)}}


def _set_aside(checkpoints: Checkpoints, step: int, problems: list[str]) -> dict[str, Any]:
    """Rename a damaged checkpoint to `damaged_step_…`: it stays, and does not count any more. By rank 0.

    Raises CheckpointError: there is no older checkpoint, or it cannot be renamed.
    """
    path = by_step(checkpoints.folder)[step]
    if checkpoints.newest_step(before=step) is None:
        raise CheckpointError(*problems, checkpoints.way_back(step, path))
    names = (f"damaged_step_{step:08d}{suffix}" for suffix in chain([""], (f"_{number}" for number in count(2))))
    aside = next(place for name in names if not (place := path.with_name(name)).exists())
    try:
        writing.move(path, aside, checkpoints.within)
    except OSError as error:
        raise CheckpointError(*problems, f"{path}: cannot be renamed to {aside.name}: {error.strerror}") from error
    return asdict(SetAside(step, str(path), str(aside), problems))
