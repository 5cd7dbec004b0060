"""In: the trainer of a run that outlives its ranks. Out: what this rank holds of a step, when another one is lost.
Does not find out what all ranks hold together (checkpoint/held.py does) and copies no tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from codescent.base.agreement import from_first, rank
from codescent.base.errors import UserError
from codescent.base.output import progress
from codescent.checkpoint.checkpoints import Checkpoints
from codescent.checkpoint.held import HeldTensors, MemoryCheckpoint, find, whole_tensors
from codescent.train.hang_up import Alarm
from codescent.train.trainer import Trainer


class HeldStep:
    """Knows of which step the tensors of a rank are. Collective to make.

    Args:
        trainer: of a generation. Its tensors have initial values, until `begin`.
        state: the JSON data of the checkpoint of a step.
    """

    def __init__(self, trainer: Trainer, state: Callable[[int], dict[str, Any]]) -> None:
        self.trainer, self._state = trainer, state
        self.step: int | None = None  # the tensors are of no step yet
        self._whole = whole_tensors(trainer.tensors())
        trainer.executor.updated = [*trainer.executor.updated, self.begin]

    def begin(self, step: int) -> None:
        """From now on the tensors are those of this step: they are loaded, or updated."""
        self.step = step

    def held(self) -> HeldTensors | None:
        """What this rank holds; None: its tensors are those of no step."""
        if self.step is None or self.trainer.optimizer.is_updating:
            return None
        return HeldTensors(self.step, self._state(self.step), dict(self.trainer.tensors()), self._whole)


def holding(trainer: Trainer, state: Callable[[int], dict[str, Any]]) -> HeldStep | None:
    """What the ranks of a run hold after a loss; None: the run ends by one, or its ranks hold nothing that suffices."""
    if Alarm.current is None or trainer.why_unheld:
        return None
    return HeldStep(trainer, state)


def in_memory(checkpoints: Checkpoints, is_written: Callable[[int], bool]) -> MemoryCheckpoint | None:
    """The step that the ranks hold whole together, after a loss. Collective. None: a checkpoint has to be read.

    `is_written`: whether the run folder has all that follows from a step. It is asked on rank 0.
    """
    alarm = Alarm.current
    if alarm is None:
        return None
    held = alarm.held if alarm.held is not None and alarm.held.tensors else None  # else it was loaded
    tells = _tell if alarm.call.is_urgent else _stay_silent  # else nobody was lost: the run begins, or others join
    found = find(held, checkpoints.folder, tells)
    alarm.held = None if found is None else found.held  # another loss may come before it is loaded
    if found is None:
        return None

    def counts() -> bool:
        return is_written(found.step) and (checkpoints.newest_step() or 0) <= found.step

    if from_first(UserError, counts):
        return found
    found.held.tensors.clear()
    if rank() == 0:
        _tell(f"step {found.step} is done again: its row or its checkpoint was not written, or a newer one was")
    return None


def _stay_silent(why: str) -> None:
    """The reason is not worth a line."""


def _tell(why: str) -> None:
    progress([f"after the loss: {why}"])
