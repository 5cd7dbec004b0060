"""In: the validation losses of a run, in order. Out: which one is the lowest, and whether the run ends early.
Does not compute a loss (validate.py does), and does not save or end anything (loop.py does)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from codescent.train.open import OpenRun


@dataclass
class Validations:
    """The validation losses of a run so far. Every rank has the same ones.

    Attributes:
        stop_after: the run ends early after so many validations in a row without a lower loss; 0: never.
        lowest: the lowest loss; infinite before the first validation.
        lowest_step: its step; 0 before the first validation.
        without_gain: number of validations after that step.
        saved: the lowest validation loss of a checkpoint; infinite: no checkpoint has one.
        exhausted: whether `stop_after` validations have passed without a lower loss.
    """

    stop_after: int
    lowest: float = math.inf
    lowest_step: int = 0
    without_gain: int = 0
    saved: float = math.inf
    exhausted: bool = False

    def recall(self, run: OpenRun) -> None:
        """Count the validations of the run's earlier commands, from its metrics and checkpoints. Collective.

        Raises:
            UserError: on every rank: a file of metrics is damaged.
        """
        if run.resumes:
            self.read(run)

    def read(self, run: OpenRun) -> None:
        """Count the validations that the run folder has. Collective, errors as of `recall`."""
        losses, saved = run.world.from_first(lambda: _recorded(run))
        self.saved = math.inf if saved is None else saved
        for step, loss in losses:
            self.add(step, loss)

    def add(self, step: int, loss: float) -> None:
        """Count a validation. A loss that is not finite is not lower than any other."""
        if loss < self.lowest:
            self.lowest, self.lowest_step, self.without_gain = loss, step, 0
        else:
            self.without_gain += 1
        self.exhausted = 0 < self.stop_after <= self.without_gain


def _recorded(run: OpenRun) -> list[Any]:
    """[[step, loss] of each recorded validation, lowest validation loss of a checkpoint], as JSON data. On rank 0."""
    rows = run.folder.iter_metrics() if run.folder is not None and run.config.train.stop_after else ()
    losses = [[row["step"], row["val_loss"]] for row in rows if row["val_loss"] is not None]
    return [losses, run.checkpoints.best_loss()]
