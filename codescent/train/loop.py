"""In: a config, this process's rank. Out: a run folder with a trained model. It takes the steps, validates and saves.
Does not open the run (open.py), compute a step (execute.py) or write metrics and messages (report.py)."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from codescent.base.agreement import together, with_past
from codescent.base.ending import ends_soon
from codescent.base.errors import UserError
from codescent.base.output import say
from codescent.base.progress import ENDED
from codescent.base.rank import Rank
from codescent.base.stopping import forget_code
from codescent.base.time_limit import stop_at
from codescent.config.sections import Config
from codescent.preflight import run_folder
from codescent.strategies.worker import Worker
from codescent.train.alike import Diverged, compare, replicated_tensors
from codescent.train.assemble import Trainer, assemble
from codescent.train.beside import COMPARISON, LOGGERS, PROFILE, REMOVAL, SAVE, VALIDATION, Beside
from codescent.train.continuing import nothing_to_do, write_new_places
from codescent.train.culprit import SKIPS_ALLOWED, Culprit
from codescent.train.late import join, refuse_restarts
from codescent.train.loggers import Logger, load
from codescent.train.machine import peak_memory_bytes
from codescent.train.open import OpenRun, connect, open_data, open_resumed, open_run
from codescent.train.optimize import learning_rate
from codescent.train.orders import append_order, rewind_order
from codescent.train.out_of_memory import Explained
from codescent.train.outcome import Outcome
from codescent.train.profile import Profiler
from codescent.train.ranks import RankTimes
from codescent.train.regroup import regroup, report_changes
from codescent.train.report import Report
from codescent.train.result import Pending, StepResult
from codescent.train.slow_steps import SlowSteps
from codescent.train.starts import before_it_begins, counted_if_stopped, refuse_idle
from codescent.train.stop import StopRequest
from codescent.train.validate import validation_loss
from codescent.train.validations import Validations


def train(config: Config, place: Rank, *, resume: bool, notes: Sequence[str] = ()) -> Outcome:
    """Train, as one of the ranks of a run.

    Args:
        config: the resolved config.
        place: this process among the ranks.
        resume: continue the run in the folder that the config names. Rank 0's counts: with --resume=auto each rank
            looks for the folder, and a network file system may show it late.
        notes: sentences that the user has been shown; rank 0 records them.

    Raises:
        UserError: on every rank: the run cannot begin with this config, data or machine; or later, the disk is full.
        RunFailed: on every rank: loss, gradients or weights are no longer finite, or copies of the same tensors
            differ; that step is not saved. Or a job is started in vain.
        StopAsked: on every rank: one was asked to stop before the run began.
    """
    with counted_if_stopped(None if resume or place.rank else run_folder(config)):
        connected = connect(config, place)
    with connected as world, with_past(world.past):
        if not place.local_rank:
            forget_code(os.environ)
        world.from_first(lambda: refuse_restarts(config.parallel.restarts, world))
        end_s = world.from_first(lambda: stop_at(os.environ))
        loggers: list[Logger] = []
        world.from_first(lambda: loggers.extend(load(config.log.to)))
        resume = world.from_first(lambda: resume)
        folder = open_resumed(config, world) if resume else None
        refuse_idle(folder, world)
        with before_it_begins(None if resume else run_folder(config), world):
            config, plan, dataset = open_data(config, world, folder, resume=resume)
        with (
            StopRequest(alone=place.world_size == 1, end_s=end_s) as stop,
            closing(open_run(config, plan, dataset, world, folder, resume=resume)) as run,
        ):
            outcome = _nothing_to_do(run) if resume else None
            if outcome is None:
                compiles = run.machine["compile"]["choice"]
                with (
                    Explained(run) as explained,
                    closing(assemble(config, plan, world, dataset, run.first_step, stop, compiles)) as trainer,
                    Report(run, loggers, notes) as report,
                    Profiler(run, report) as profiler,
                    ends_soon(place.world_size),
                ):
                    explained.watch = trainer.executor.memory
                    outcome = _Steps(run, trainer, report, stop, profiler).take()
            world.at(ENDED)
        if outcome.exit_code:
            world.leave()
        return outcome


def _nothing_to_do(run: OpenRun) -> Outcome | None:
    """The outcome of a resumed run that has nothing to do; None: it has steps to do.

    Nothing in its folder changes, except new places of its files, which other commands need.
    """
    lines = nothing_to_do(run)
    if not lines:
        return None
    keys: list[str] = run.world.from_first(lambda: write_new_places(run))
    if run.world.is_first:
        say([*lines, *([f"{run.path} now has the new value of {' and '.join(keys)}"] if keys else [])])
    is_early, keeps_best = run.first_step < run.config.train.num_steps, run.config.checkpoint.keep_best
    suggests_best = is_early and keeps_best and run.checkpoints.best_loss() is not None
    return Outcome(run.path, run.first_step, 0, suggests_best, has_trained=False)


@dataclass(frozen=True)
class _Launched:
    """A step that is launched: its number (from 1), its learning rate, and its result, which may come later."""

    step: int
    rate: float
    pending: Pending


class _Steps:
    """The remaining steps of a run.

    Off the CPU the result of a step is read when the next step is launched, so that the device never waits for the
    host. It is read at once if something is due at the step: `_reads_at_once`. Only such a step is saved. All ranks
    decide this alike, because they read the same results.
    """

    def __init__(self, run: OpenRun, trainer: Trainer, report: Report, stop: StopRequest, profiler: Profiler) -> None:
        self.run, self.trainer, self.report, self.stop, self.profiler = run, trainer, report, stop, profiler
        self.config, self.plan = run.config, run.plan
        self.copies = replicated_tensors(run.plan, run.world.place.rank, trainer.parts, trainer.optimizer)
        self.slow_steps = SlowSteps()
        self.times, self.beside = RankTimes(), Beside(run.world)
        self.skipped = 0  # consecutive skipped steps, up to the current step
        self.culprit = Culprit(run.world.store)
        self.good = run.first_step  # the last step that all ranks know, and none has skipped
        self.overdue = False  # a checkpoint was due at a step that could not be saved; the next good step is saved
        self.unproven = False  # no finite step has followed the newest checkpoint yet, so older checkpoints stay
        self.validations = Validations(self.config.train.stop_after)
        self.last = self.config.train.num_steps  # an early end makes an earlier step the last one

    def take(self) -> Outcome:
        """Take the remaining steps."""
        step = self._begin()
        before: _Launched | None = None  # a step whose result is not read yet
        while step < self.last:
            stops, launched = False, self._launch(step + 1)
            step = launched.step
            if before is not None:
                stops = self._finish(before, newest=False)
            before = launched
            if stops or launched.pending.result is not None:
                stops, before = self._finish(launched, newest=True), None
            self._profiled(step)
            if stops and step < self.last:
                self.stop.is_obeyed = True
                exit_code = self.report.stopped(step, together(UserError, self.stop.received))
                return Outcome(self.run.path, step, exit_code)
        self._rotate()
        self.report.beside(step, self.beside.take())
        self.report.ended(step, self.validations)
        has_best = self.config.checkpoint.keep_best and self.validations.saved < math.inf
        return Outcome(self.run.path, step, 0, has_best and step < self.config.train.num_steps)

    def _begin(self) -> int:
        """Load the checkpoint, if there is one, or join those who train. Returns the number of steps that are done."""
        run, worker = self.run, self.trainer.executor.worker
        if run.world.past is not None:
            run.world.past.end()
        if run.world.place.late:
            assert isinstance(worker, Worker)
            return join(run.world, worker)
        self.report.begin()
        run.load(self.trainer)
        rewind_order(self.trainer.executor, run.path, run.first_step)
        self.report.start()
        self._compare(run.first_step)
        self.validations.recall(run)
        if self.validations.exhausted:  # by the last step of an earlier command
            self.last = run.first_step
        return run.first_step

    def _profiled(self, step: int) -> None:
        """Tell the profiler that a step is done. At the end of a window it writes files, on all ranks."""
        begin = time.perf_counter()
        if self.profiler.stepped(step):
            self.beside.add(PROFILE, time.perf_counter() - begin)
            if step < self.last:
                self.beside.meet()

    def _launch(self, step: int) -> _Launched:
        """Launch step `step` (from 1), and read its result if it is there or needed."""
        rate = self._rate(step)
        with self.profiler.step(step):
            pending = self.trainer.executor.launch(step - 1, rate)
            if not pending.is_late or self._reads_at_once(step):
                pending.read()
        return _Launched(pending.completed, self._rate(pending.completed), pending)

    def _rate(self, step: int) -> float:
        """Learning rate of step `step` (from 1)."""
        return learning_rate(self.config.optimizer, self.config.train.num_steps, self.plan.mesh.dp, step - 1)

    def _reads_at_once(self, step: int) -> bool:
        """Whether something may be due at `step`: its first line, a validation, a comparison, a save, its profile."""
        train = self.config.train
        every = (train.eval_every, train.check_every, self.config.checkpoint.every, self.config.log.every)
        return (
            step == self.run.first_step + 1
            or step == self.last
            or any(_is_due(step, number, self.last) for number in every)
            or self.plan.layout.hands_out
            or (self.plan.layout.apart and self.plan.schedule.agrees_after(step))  # a stop or a skip may be known
            or self.overdue
            or self.validations.exhausted
            or self.profiler.has_steps_left
        )

    def _finish(self, launched: _Launched, *, newest: bool) -> bool:
        """Read the result of a step; validate, report and save if due. Returns whether the ranks have to stop.

        `newest`: no other step is launched yet. Otherwise a request to stop counts for that one.
        """
        step, earlier = launched.step, launched.pending.read_earlier()
        for number, result in enumerate(earlier, step - len(earlier)):
            self._within_round(number, self._rate(number), result)
        result = launched.pending.read()
        served = self.plan.layout.hands_out
        if not (self.plan.schedule.agrees_after(step) or (served and result.stop)):
            self._within_round(step, launched.rate, replace(result, stop=False))
            return False
        if served:
            executor = self.trainer.executor
            lost, joined = regroup(self.run.world, self.plan, executor.serving, step)
            report_changes(self.run, lost, joined)
            if joined:
                self._tell()
            result = self._shared(result)
            append_order(executor, self.run.path)
        stops = result.stop
        self._act(step, launched.rate, result if newest else replace(result, stop=False))
        if not stops and step < self.last:  # else the ranks meet until they end
            self.beside.meet()
            self.run.world.meets(0)
        return stops

    def _within_round(self, step: int, rate: float, result: StepResult) -> None:
        """What follows from a step after which the ranks do not agree: this rank's own row. No rank waits."""
        if self.plan.layout.hands_out:
            self.skipped = self.culprit.note(result, self.skipped)
            self.stop.must_meet |= self.run.world.is_first and self.skipped >= SKIPS_ALLOWED  # it knows of each step
            if result.skipped:
                self.report.skipped(step, result, self.culprit.of(result.culprit))
        parts = result.parts(result.step_s)
        self.report.late(step, result.late)
        self.report.step(step, rate, result, parts, result.step_s, None, last=False)
        self.times.add(result.step_s, parts)

    def _tell(self) -> None:
        """Those who have come late learn what the others know of the run. Collective."""
        known: list[Any] = [self.good, self.overdue, self.unproven, self.last, asdict(self.validations)]
        *known, validations = self.run.world.from_first(lambda: known)
        self.good, self.overdue, self.unproven, self.last = known
        self.validations = Validations(**validations)

    def _shared(self, result: StepResult) -> StepResult:
        """What rank 0 knows of the last step of a segment; on each rank the same. Servers may count pushes in another
        order, and only rank 0 is told of every step. It alone knows if the run folder was renamed, too."""
        assert result.staleness is not None
        mean, most = result.staleness
        mine: list[Any] = [result.train_loss, result.grad_norm, mean, result.skips, most, self.skipped, result.culprit]
        mine += [self.culprit.found]
        *mine, path = self.run.world.from_first(lambda: [*mine, str(self.run.follow())])
        loss, norm, mean, skips, most, self.skipped, culprit, self.culprit.found = mine
        self.run.path = Path(path)
        stop = not self.run.world.all_agree(not result.stop)
        result = replace(result, train_loss=loss, grad_norm=norm, skips=skips, staleness=(mean, most), stop=stop)
        return replace(result, culprit=culprit)

    def _act(self, step: int, rate: float, result: StepResult) -> None:
        """What follows from the result of step `step`."""
        num_steps, seconds = self.config.train.num_steps, result.step_s
        self.report.slow(step, self.slow_steps.add(seconds))
        self._count(step, result)
        self.report.late(step, result.late)
        if result.stop and not self.skipped:  # save before anything else: a scheduler soon kills the process
            self._save(step, None)
        val_loss = self._validate(step) if _is_due(step, self.config.train.eval_every, num_steps) else None
        if self.validations.exhausted and not (self.skipped or result.stop):  # after a skipped step: the next good one
            self.last = step
        parts = result.parts(seconds)
        with self.beside.doing(LOGGERS) if self.config.log.to else nullcontext():
            self.report.step(step, rate, result, parts, seconds, val_loss, last=step == self.last)
        self.times.add(seconds, parts)
        if result.stop or self._is_due(step, self.config.log.every, self.last):
            self.report.beside(step, self.beside.take())
            memory = self.trainer.executor.memory.numbers()
            self.report.ranks(
                *self.times.gather(step, peak_memory_bytes(self.run.world.device), memory, self.run.world.living)
            )
        if self.skipped and (result.stop or step == self.last or self.skipped >= SKIPS_ALLOWED):
            why = f"loss or gradients are not finite, skipped steps in a row: {self.skipped}"
            raise self.report.failed(step, why, ruined_step=self.good, culprit=self.culprit.words)
        if not result.stop:
            saved = self._save_if_due(step, val_loss)
            if not saved and self._is_due(step, self.config.train.check_every, self.last):
                with self.beside.doing(COMPARISON):
                    self._compare(step)
        elif self._is_best(val_loss):  # replace the checkpoint that has no validation loss
            self._save(step, val_loss)

    def _is_due(self, step: int, every: int, last: int) -> bool:
        """Whether a multiple of `every` is among the steps since the ranks agreed before, or `step` is the last one."""
        before = self.plan.schedule.agreed_before(step)
        return bool(every) and (step == last or step // every > before // every)

    def _count(self, step: int, result: StepResult) -> None:
        """Count consecutive skipped steps. After a finite step, checkpoints older than the newest may be deleted.

        Of a round whose last step was skipped, as many steps count as each replica has skipped, at least one.
        """
        before, of_each = self.skipped, result.skips // self.plan.mesh.dp_replicate if self.plan.apart else 1
        self.skipped = self.culprit.note(result, self.skipped, max(1, of_each))
        if result.skipped:
            self.report.skipped(step, result, self.culprit.of(result.culprit))
            self._look_at_data(step)
        elif not self.skipped:
            self.report.bad_data.clear()
            self.good = step
            self._rotate()
            if result.skips:
                self.report.skipped_before(step, result.skips)
        if self.skipped and not before:  # the cause may be one rank's weights
            self._compare(step)

    def _save_if_due(self, step: int, val_loss: float | None) -> bool:
        """Save if a checkpoint is due now, or was due at an earlier step that could not be saved, or is the best one.

        Returns:
            whether a checkpoint was saved.

        Raises:
            RunFailed: the last step cannot be saved.
        """
        checkpoint = self.config.checkpoint
        at_end = checkpoint.last and step == self.last
        due, why = at_end or bool(checkpoint.every and step % checkpoint.every == 0), ""
        if self.skipped:
            why = "steps are skipped"
        elif val_loss is not None and not math.isfinite(val_loss):
            why = f"the validation loss is {val_loss}"
        if why and step == self.last:
            raise self.report.failed(step, why, ruined_step=step)
        if why and due:
            self.report.not_saved(step, why)
        self.overdue |= due
        if why or not (self.overdue or self._is_best(val_loss)):
            return False
        self._save(step, val_loss)
        return True

    def _is_best(self, val_loss: float | None) -> bool:
        """Whether `checkpoint.keep_best` keeps a checkpoint with this loss: it is lower than that of every other."""
        return self.config.checkpoint.keep_best and val_loss is not None and val_loss < self.validations.saved

    def _validate(self, step: int) -> float:
        source = self.run.source("validation")
        with self.beside.doing(VALIDATION), self.trainer.with_means():
            loss = 0.0
            if not self.plan.only_serves(self.run.world.place.rank):
                loss = validation_loss(self.trainer.executor, source, self.config.train.eval_samples)
            if self.plan.layout.server_ranks:
                loss = self.run.world.from_first(lambda: loss)
        self.validations.add(step, loss)
        if not math.isfinite(loss):
            self._look_at_data(step)
        return loss

    def _look_at_data(self, step: int) -> None:
        """Say what is not finite in the samples of the steps up to `step`, on every rank. Collective."""
        read, rank = self.trainer.executor.bad_data, self.run.world.place.rank
        lines = [f"rank {rank}: {what}" for number in sorted(read) if number <= step for what in read.pop(number)]
        self.report.not_finite_data(step, [line for of_rank in together(UserError, lambda: lines) for line in of_rank])

    def _compare(self, step: int) -> None:
        """Compare the ranks' copies of tensors. If copies differ, record it and raise Diverged."""
        try:
            compare(self.copies, f"{self.run.path}: step {step}")
        except Diverged as error:
            self.report.diverged(step, error)
            raise

    def _save(self, step: int, val_loss: float | None) -> None:
        with self.beside.doing(SAVE):
            self._save_now(step, val_loss)

    def _save_now(self, step: int, val_loss: float | None) -> None:
        self._compare(step)
        begin = time.perf_counter()
        if not self.run.world.all_agree(self.trainer.optimizer.is_finite()):
            raise self.report.failed(step, "weights or the optimizer's state are not finite", ruined_step=step)
        path = self.run.save(step, self.trainer.tensors(), val_loss)
        self.report.saved(step, path, time.perf_counter() - begin, best=self._is_best(val_loss))
        self.overdue, self.unproven = False, True
        if val_loss is not None:
            self.validations.saved = min(self.validations.saved, val_loss)

    def _rotate(self) -> None:
        if self.unproven:
            with self.beside.doing(REMOVAL):
                if self.run.world.is_first:
                    self.run.checkpoints.rotate()
        self.unproven = False


def _is_due(step: int, every: int, last: int) -> bool:
    """Whether `step` is a multiple of `every` or the last step; False if `every` is 0."""
    return bool(every) and (step == last or step % every == 0)
