"""In: how a run stands after a step. Out: a checkpoint if one is due; compared copies; old checkpoints removed.
Does not write files (checkpoint/ does) and does not decide when steps are taken (loop.py does)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from codescent.base.errors import RunFailed
from codescent.checkpoint.checkpoints import CheckpointError, NoRoom
from codescent.checkpoint.held import MemoryCheckpoint
from codescent.checkpoint.save_beside import SaveBeside, Staging, Unsound
from codescent.train.alike import Diverged, compare, replicated_tensors
from codescent.train.beside import COMPARISON, REMOVAL, SAVE, Beside
from codescent.train.dues import Due
from codescent.train.finite import all_finite
from codescent.train.hang_up import outlives
from codescent.train.heal import heal
from codescent.train.open import OpenRun
from codescent.train.report import Report
from codescent.train.standing import Standing
from codescent.train.trainer import Trainer

NOT_FINITE = "weights or the optimizer's state are not finite"


@dataclass
class UnderWay:
    """A save beside training.

    Attributes:
        step, val_loss: of the checkpoint.
        save: writes it.
        begin: when it began, of time.perf_counter.
        blocked_s: seconds in which this rank did not train.
        folder: of the run, when it began.
    """

    step: int
    val_loss: float | None
    save: SaveBeside
    begin: float
    blocked_s: float
    folder: Path


class Saving:
    """Saves the checkpoints of a run, and compares the copies of tensors that several ranks hold.

    With checkpoint.asynchronous files are written beside training. What the ranks agree on for it, they agree on here,
    between two steps: so no message of a save can meet one of a step. One save is under way at a time.

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
        self.heals = run.config.survive.on_divergence == "heal"
        self.keys, self.staging = run.config.checkpoint, Staging()
        self.under_way: UnderWay | None = None

    def after(self, step: int, *, first_skip: bool) -> None:
        """What follows from the result of a step. Collective while a save is under way.

        `first_skip`: the step was skipped, and the one before it was not: the cause may be one rank's weights.
        """
        if self.under_way is not None and self.run.world.all_agree(self.under_way.save.ready):
            self._go_on(step)
        if self.standing.unproven and not (self.standing.skipped or self.standing.refused):
            self._rotate()
        elif first_skip:
            self.compare(step)

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
            raise self.failed(step, why, ruined_step=step)
        if why and due.save:
            self.report.faults.not_saved(step, why)
        standing.overdue |= due.save
        if not why and (standing.overdue or self.is_best(val_loss)):
            if step == standing.last:
                self.save(step, val_loss)
            else:
                with self._without_room(step):
                    (self._begin if self.keys.asynchronous else self.save)(step, val_loss)
        elif due.comparison:
            with self.beside.doing(COMPARISON):
                self.compare(step)

    def is_best(self, val_loss: float | None) -> bool:
        """Whether `checkpoint.keep_best` keeps a checkpoint with this loss: it is lower than that of every other."""
        lowest = self.standing.validations.saved
        if self.under_way is not None and self.under_way.val_loss is not None:
            lowest = min(lowest, self.under_way.val_loss)
        return self.keys.keep_best and val_loss is not None and val_loss < lowest

    def compare(self, step: int) -> None:
        """Compare the ranks' copies of tensors. If they differ, `survive.on_divergence` says: heal, or raise Diverged.

        Before the first step the ranks have read other weights, and no majority knows better.
        """
        where = f"{self.run.path}: step {step}"
        try:
            compare(self.copies, where)
        except Diverged as error:
            self.trainer.executor.let_change()  # healing does
            have_trained = step > self.run.first_step or isinstance(self.run.saved, MemoryCheckpoint)
            if self.heals and have_trained and heal(self.copies, error):
                compare(self.copies, where)
                self.report.faults.healed(step, error)
                return
            self._settle_before_the_end(step)
            self.report.faults.diverged(step, error)
            raise

    def checkpoint_of(self, step: int) -> Path:
        """The folder of the checkpoint of a step; saved now, if it is not yet."""
        self.settle(step)
        if self.last is not None and self.last[0] == step:
            return self.last[1]
        return self.save(step, None)

    def save(self, step: int, val_loss: float | None) -> Path:
        """Save step `step`, and wait for it. Returns its folder. Raises RunFailed: weights or state are not finite."""
        self.settle(step)
        with self.beside.doing(SAVE):
            self.compare(step)
            begin = time.perf_counter()
            if not self.run.world.all_agree(self.trainer.optimizer.is_finite()):
                raise self.report.faults.failed(step, NOT_FINITE, ruined_step=step)
            path = self.run.save(step, self.trainer.tensors(), val_loss)
            self._saved(step, path, val_loss, time.perf_counter() - begin)
        return path

    def failed(self, step: int, why: str, ruined_step: int, culprit: str = "", *, spiked: bool = False) -> RunFailed:
        """See `FaultReport.failed`. First the save that is under way is completed: its weights were good."""
        self._settle_before_the_end(step)
        return self.report.faults.failed(step, why, ruined_step, culprit, spiked=spiked)

    def end(self, step: int) -> None:
        """The last step is done: complete the save that is under way, and remove old checkpoints."""
        self.settle(step)
        if self.standing.unproven:
            self._rotate()

    def let_go(self, step: int) -> None:
        """The ranks let go of the run at step `step`, which may be in their memory alone. Collective.

        Nobody may get a part of it from a rank whose copies differ.
        """
        self.settle(step)
        if self.last is None or self.last[0] != step:
            self.compare(step)

    def end_by_error(self, error: Exception) -> None:
        """The run ends by an error of any kind. One rank alone completes the save that is under way: its thread would
        be left in a notebook. Of several ranks, others may not answer: their processes end. If they go on, the save is
        given up, so that it cannot appear among those of the next generation."""
        if self.under_way is not None and outlives(error):
            self.under_way.save.give_up()
        elif self.under_way is not None and self.run.world.this_rank.world_size == 1:
            with suppress(RunFailed):  # that save's weights are not finite: this is recorded
                self._settle_before_the_end(self.under_way.step)

    def _begin(self, step: int, val_loss: float | None) -> None:
        """Begin to save step `step` beside training. Waits for the save before it."""
        self.settle(step)
        with self.beside.doing(SAVE):
            self.compare(step)
            begin, run = time.perf_counter(), self.run
            run.all_follow()
            folder = run.path
            save = SaveBeside(
                run.checkpoints, step, self.trainer.tensors(), run.state(step), val_loss, self.staging, all_finite
            )
            if self.trainer.keeps_more:
                save.wait_for_copy()
            self.under_way = UnderWay(step, val_loss, save, begin, time.perf_counter() - begin, folder)
            self.trainer.executor.before_change = self._wait_for_copy
            self.standing.overdue = False

    def _wait_for_copy(self) -> None:
        """Weights are about to change: wait until the save that is under way has copied them."""
        if self.under_way is not None:
            begin = time.perf_counter()
            self.under_way.save.wait_for_copy()
            self.under_way.blocked_s += time.perf_counter() - begin

    def settle(self, step: int) -> None:
        """Complete the save that is under way, if there is one: wait for it. Collective then."""
        while self.under_way is not None:
            self._go_on(step)

    def _settle_before_the_end(self, step: int) -> None:
        """The same before the run ends by a fault. A save that fails is reported, and does not hide the fault."""
        saved = None if self.under_way is None else self.under_way.step
        try:
            self.settle(step)
        except CheckpointError as error:
            assert saved is not None
            self.report.faults.save_failed(saved, error, goes_on=False)

    def _go_on(self, step: int) -> None:
        """Go on with the save that is under way, at step `step`, when all ranks have done their part. Collective.

        Raises:
            RunFailed: weights or state were not finite.
            CheckpointError: the save has failed, and the run does not go on without it.
        """
        under_way, self.under_way = self.under_way, None
        assert under_way is not None
        saved, save = under_way.step, under_way.save
        with self.beside.doing(SAVE), self._without_room(saved):
            begin = time.perf_counter()
            save.wait()
            try:
                path = save.go_on()
            except Unsound as error:
                raise self.report.faults.failed(step, NOT_FINITE, ruined_step=saved) from error
            except CheckpointError:
                if not self.run.was_renamed(under_way.folder):
                    raise
                self.report.faults.not_saved(saved, "the run folder was renamed meanwhile")
                self.standing.overdue = True
                return
            now = time.perf_counter()
            under_way.blocked_s += now - begin
            if path is None:
                self.under_way = under_way
            else:
                self._saved(saved, path, under_way.val_loss, now - under_way.begin, under_way.blocked_s)

    @contextmanager
    def _without_room(self, step: int) -> Iterator[None]:
        """A block with a save of step `step`. If it fails for want of room, checkpoint.on_failed_save decides."""
        try:
            yield
        except NoRoom as error:
            if self.keys.on_failed_save == "stop":
                raise
            self.report.faults.save_failed(step, error)
            self.standing.overdue = False  # the next due step tries again

    def _saved(
        self, step: int, path: Path, val_loss: float | None, seconds: float, blocked_s: float | None = None
    ) -> None:
        """The checkpoint of a step is complete. Collective."""
        self.report.saved(step, path, seconds, best=self.is_best(val_loss), blocked_s=blocked_s)
        if blocked_s is None:
            self.standing.overdue = False
        self.standing.unproven = True
        if val_loss is not None:
            self.standing.validations.saved = min(self.standing.validations.saved, val_loss)
        self.last = step, path

    def _rotate(self) -> None:
        """Remove checkpoints that are not kept. A finite step has followed the newest one (`Standing.unproven`)."""
        with self.beside.doing(REMOVAL):
            if self.run.world.is_first:
                self.run.checkpoints.rotate()
        self.standing.unproven = False


@contextmanager
def completing(saving: Callable[[], Saving | None]) -> Iterator[None]:
    """A block that takes steps. `saving`: of the present generation; None: there is none just now."""
    try:
        yield
    except Exception as error:  # not a second Ctrl-C, which waits for nothing
        if (present := saving()) is not None:
            present.end_by_error(error)
        raise
