"""In: the trainer of a run that outlives its ranks. Out: what this rank holds of a step, when another one is lost.
Does not find out what all ranks hold together (checkpoint/held.py does) and copies no tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from codescent.base.output import progress
from codescent.checkpoint.checkpoints import Checkpoints
from codescent.checkpoint.held import HeldTensors, MemoryCheckpoint, find, whole_tensors
from codescent.train.hang_up import Alarm
from codescent.train.trainer import Trainer


class Holding:
    """Knows of which step the tensors of a rank are. Collective to make.

    Args:
        trainer: of a generation.
        first_step: the steps that are done when it begins.
        state: the JSON data of the checkpoint of a step.
    """

    def __init__(self, trainer: Trainer, first_step: int, state: Callable[[int], dict[str, Any]]) -> None:
        self.trainer, self.step, self._state = trainer, first_step, state
        self._whole = whole_tensors(trainer.tensors())
        trainer.executor.updated = [*trainer.executor.updated, self._stepped]

    def _stepped(self, step: int) -> None:
        self.step = step

    def held(self) -> HeldTensors | None:
        """What this rank holds; None: an update was under way."""
        if self.trainer.optimizer.is_updating:
            return None
        return HeldTensors(self.step, self._state(self.step), dict(self.trainer.tensors()), self._whole)


def holding(trainer: Trainer, first_step: int, state: Callable[[int], dict[str, Any]]) -> Holding | None:
    """What the ranks of a run hold after a loss; None: the run ends by one, or its ranks hold nothing that suffices."""
    if Alarm.current is None or trainer.coupling.why_unheld:
        return None
    return Holding(trainer, first_step, state)


def in_memory(checkpoints: Checkpoints) -> MemoryCheckpoint | None:
    """The step that the ranks hold whole together, after a loss. Collective. None: a checkpoint has to be read."""
    if Alarm.current is None:
        return None
    held, Alarm.current.held = Alarm.current.held, None
    return find(held, checkpoints.folder, lambda why: progress([f"after the loss: {why}"]))
