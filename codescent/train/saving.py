"""In: how a run stands after a step. Out: a checkpoint if one is due; compared copies; old checkpoints removed.
Does not write files (checkpoint/ does) and does not decide when steps are taken (loop.py does)."""

from __future__ import annotations

import math
import time
from pathlib import Path

from codescent.train.alike import Diverged, compare, replicated_tensors
from codescent.train.beside import COMPARISON, REMOVAL, SAVE, Beside
from codescent.train.dues import Due
from codescent.train.open import OpenRun
from codescent.train.report import Report
from codescent.train.standing import Standing
from codescent.train.trainer import Trainer


class Saving:
    """Saves the checkpoints of a run, and compares the copies of tensors that several ranks hold.

    Args:
        run, trainer, report: of the run.
        standing: how it stands.
        beside: measures what ranks do between steps.
    """

    def __init__(self, run: OpenRun, trainer: Trainer, report: Report, standing: Standing, beside: Beside) -> None:
        self.run, self.trainer, self.report = run, trainer, report
        self.standing, self.beside = standing, beside
        self.last: tuple[int, Path] | None = None  # step and folder of the checkpoint that was saved last
        self.copies = replicated_tensors(run.plan, run.world.this_rank.rank, trainer.parts, trainer.optimizer)

    def if_due(self, step: int, due: Due, val_loss: float | None) -> None:
        """Save if a checkpoint is due now, or was due at an earlier step that could not be saved, or is the best one.
        Else compare the copies, if that is due.

        Raises:
            RunFailed: the last step cannot be saved.
            Diverged: copies differ.
        """
        standing, why = self.standing, ""
        if standing.skipped:
            why = "steps are skipped"
        elif val_loss is not None and not math.isfinite(val_loss):
            why = f"the validation loss is {val_loss}"
        if why and step == standing.last:
            raise self.report.failed(step, why, ruined_step=step)
        if why and due.save:
            self.report.not_saved(step, why)
        standing.overdue |= due.save
        if not why and (standing.overdue or self.is_best(val_loss)):
            self.save(step, val_loss)
        elif due.comparison:
            with self.beside.doing(COMPARISON):
                self.compare(step)

    def is_best(self, val_loss: float | None) -> bool:
        """Whether `checkpoint.keep_best` keeps a checkpoint with this loss: it is lower than that of every other."""
        keeps_best = self.run.config.checkpoint.keep_best
        return keeps_best and val_loss is not None and val_loss < self.standing.validations.saved

    def compare(self, step: int) -> None:
        """Compare the ranks' copies of tensors. If copies differ, record it and raise Diverged."""
        try:
            compare(self.copies, f"{self.run.path}: step {step}")
        except Diverged as error:
            self.report.diverged(step, error)
            raise

    def checkpoint_of(self, step: int) -> Path:
        """The folder of the checkpoint of a step; saved now, if it is not yet."""
        if self.last is not None and self.last[0] == step:
            return self.last[1]
        return self.save(step, None)

    def save(self, step: int, val_loss: float | None) -> Path:
        """Save step `step`. Returns its folder. Raises RunFailed: weights or state are not finite."""
        with self.beside.doing(SAVE):
            return self._save_now(step, val_loss)

    def _save_now(self, step: int, val_loss: float | None) -> Path:
        self.compare(step)
        begin = time.perf_counter()
        if not self.run.world.all_agree(self.trainer.optimizer.is_finite()):
            raise self.report.failed(step, "weights or the optimizer's state are not finite", ruined_step=step)
        path = self.run.save(step, self.trainer.tensors(), val_loss)
        self.report.saved(step, path, time.perf_counter() - begin, best=self.is_best(val_loss))
        self.standing.overdue, self.standing.unproven = False, True
        if val_loss is not None:
            self.standing.validations.saved = min(self.standing.validations.saved, val_loss)
        self.last = step, path
        return path

    def rotate(self) -> None:
        """Remove checkpoints that are not kept. A finite step has followed the newest one (`Standing.unproven`)."""
        with self.beside.doing(REMOVAL):
            if self.run.world.is_first:
                self.run.checkpoints.rotate()
        self.standing.unproven = False
