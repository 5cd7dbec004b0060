"""In: a config, this process's rank. Out: a run folder with a trained model. It takes the steps, validates and saves.
Does not open the run (open.py), compute a step (execute.py) or write metrics and messages (report.py)."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path

from codescent.base.agreement import with_past
from codescent.base.rank import Rank
from codescent.base.stopping import forget_code
from codescent.base.time_limit import stop_at
from codescent.checkpoint.checkpoints import Saved
from codescent.config.rate_schedules import learning_rate
from codescent.config.sections import Config
from codescent.preflight import run_folder
from codescent.train.beside import LOGGERS, PROFILE, VALIDATION, Beside
from codescent.train.continuing import done_already
from codescent.train.dues import Dues
from codescent.train.generation import Generation
from codescent.train.memory import peak_memory_bytes
from codescent.train.open import OpenRun, connect, open_data, open_resumed, open_run
from codescent.train.out_of_memory import Explained
from codescent.train.outcome import GOES_ON, Outcome
from codescent.train.profile import Profiler
from codescent.train.ranks import RankTimes
from codescent.train.regroup import ends_or_regroups
from codescent.train.report import Report
from codescent.train.result import Launched, StepResult
from codescent.train.saving import Saving, completing
from codescent.train.skips import Culprit, Skips
from codescent.train.standing import Standing
from codescent.train.starts import before_it_begins, counted_if_stopped, refuse_idle, refuse_restarts
from codescent.train.stop import StopRequest
from codescent.train.trackers import Logger, loggers_of
from codescent.train.validate import Validated, validated
from codescent.train.validations import Validations


def train(config: Config, this_rank: Rank, *, resume: bool, notes: Sequence[str] = ()) -> Outcome:
    """Train, as one of the ranks of a run.

    Args:
        config: the resolved config.
        this_rank: this process among the ranks.
        resume: continue the run in the folder that the config names. Rank 0's counts: with --resume=auto each rank
            looks for the folder, and a network file system may show it late.
        notes: sentences that the user has been shown; rank 0 records them.

    Raises:
        UserError: on every rank: the run cannot begin with this config, data or machine; or later, the disk is full.
        RunFailed: on every rank: loss, gradients or weights are no longer finite, or copies of the same tensors
            differ; that step is not saved. Or a job is started in vain.
        StopAsked: on every rank: one was asked to stop before the run began.
    """
    with counted_if_stopped(None if resume or this_rank.rank else run_folder(config)):
        connected = connect(config, this_rank)
    with connected as world, with_past(world.past):
        if not this_rank.local_rank:
            forget_code(os.environ)
        world.from_first(lambda: refuse_restarts(config, world))
        end_s = world.from_first(lambda: stop_at(os.environ))
        loggers: list[Logger] = []
        world.from_first(lambda: loggers.extend(loggers_of(config.log)))
        resume = world.from_first(lambda: resume)
        folder = open_resumed(config, world) if resume else None
        refuse_idle(folder, world)
        with before_it_begins(None if resume else run_folder(config), world):
            config, plan, dataset, said = open_data(config, world, folder, resume=resume)
        with (
            StopRequest(alone=this_rank.world_size == 1, end_s=end_s) as stop,
            closing(open_run(config, plan, dataset, world, folder, resume=resume)) as run,
        ):
            outcome = done_already(run) if resume else None
            if outcome is None:
                with (
                    Explained(run) as explained,
                    closing(Generation(run, stop)) as generation,
                    Report(run, loggers, [*notes, *said]) as report,
                    Profiler(run, report) as profiler,
                    ends_or_regroups(generation),
                ):
                    steps = _Steps(run, generation, report, stop, profiler, explained)
                    with completing(lambda: getattr(steps, "saving", None)):
                        outcome = steps.take()
            world.ends(goes_on=outcome.exit_code == GOES_ON)
        if outcome.exit_code:
            world.leave()
        return outcome


class _Steps:
    """The remaining steps of a run.

    Off the CPU the result of a step is read when the next step is launched, so that the device never waits for the
    host. It is read at once if something is due at the step: `_reads_at_once`. Only such a step is saved. All ranks
    decide this alike, because they read the same results.
    """

    def __init__(
        self,
        run: OpenRun,
        generation: Generation,
        report: Report,
        stop: StopRequest,
        profiler: Profiler,
        explained: Explained,
    ) -> None:
        self.run, self.generation, self.report, self.stop = run, generation, report, stop
        self.profiler, self.explained, self.config, self.plan = profiler, explained, run.config, run.plan
        self.standing = Standing(run.first_step, self.config.train.num_steps, Validations(self.config.train.stop_after))
        self.dues, self.beside = Dues(self.config, self.plan.schedule), Beside(run.world)
        self.culprit, self.replaces = Culprit(run.world.store), False
        self._attach()
        self.times, self.logs, self.scale_ranks = RankTimes(), run.config.log.names_loggers, run.plan.scale_ranks

    def _attach(self) -> None:
        """Work with the trainer of the present generation."""
        self.trainer = self.generation.trainer
        self.coupling, self.explained.watch = self.trainer.coupling, self.trainer.executor.memory
        self.saving = Saving(self.run, self.trainer, self.report, self.standing, self.beside)
        self.skips = Skips(self.generation, self.saving, self.culprit, self.stop)

    def take(self) -> Outcome:
        """Take the remaining steps."""
        step = self._begin()
        before: Launched | None = None  # a step whose result is not read yet
        while step < self.standing.last:
            stops, launched = False, self._launch(step + 1)
            step = launched.step
            if before is not None:
                stops = self._finish(before, newest=False)
            before = launched
            if stops or launched.pending.result is not None:
                stops, before = self._finish(launched, newest=True), None
            if self.profiler.torch is not None:
                self._profiled(step)
            if stops and step < self.standing.last:
                self.saving.let_go(step)
                return self.stop.obeyed(Outcome(self.run.path, step, self.report.stopped(step, self.stop.asked)))
            if before is None:
                step = self._replace_if_asked(step)
        self.saving.end(step)
        self.report.beside(step, self.beside.take())
        self.report.ended(step, self.standing.validations)
        has_best = self.config.checkpoint.keep_best and self.standing.validations.saved < math.inf
        return Outcome(self.run.path, step, 0, has_best and step < self.config.train.num_steps)

    def _begin(self) -> int:
        """Load the checkpoint, if there is one, or join those who train. Returns the number of steps that are done."""
        run = self.run
        if run.world.past is not None:
            run.world.past.end()
        if run.world.this_rank.late:
            return self.coupling.join()
        self.report.begin()
        self.generation.load()
        self.coupling.begin(run.path, run.first_step)
        self.report.start()
        self.saving.compare(run.first_step)
        self.standing.validations.recall(run)
        if self.standing.validations.exhausted:  # by the last step of an earlier command
            self.standing.last = run.first_step
        return run.first_step

    def _replace_if_asked(self, step: int) -> int:
        """Another generation goes on from the checkpoint of `step` or one before; returns its step. Collective then."""
        goes_on, back = step < self.standing.last and not self.standing.skipped, self.skips.back
        if back is None and not (self.replaces and goes_on and self.coupling.is_sync_point(step)):
            return step
        self.run.saved = Saved(step, self.saving.checkpoint_of(step), None, {}) if back is None else back.saved
        self.replaces, self.explained.watch = False, None
        del self.trainer, self.coupling, self.saving, self.skips  # else both generations would need memory at once
        self.generation.replace()
        self._attach()
        self.coupling.begin(self.run.path, self.run.first_step)
        return self.run.first_step

    def _profiled(self, step: int) -> None:
        """Tell the profiler that a step is done. At the end of a window it writes files, on all ranks."""
        begin = time.perf_counter()
        if self.profiler.stepped(step):
            self.beside.add(PROFILE, time.perf_counter() - begin)
            if step < self.standing.last:
                self.beside.meet()

    def _launch(self, step: int) -> Launched:
        """Launch step `step` (from 1), and read its result if it is there or needed."""
        rate = self._rate(step)
        with nullcontext() if self.profiler.torch is None else self.profiler.step(step):
            pending = self.trainer.executor.launch(step - 1, rate)
            if not pending.is_late or self._reads_at_once(step):
                pending.read()
        return Launched(pending.completed, self._rate(pending.completed), pending)

    def _rate(self, step: int) -> float:
        """Learning rate of step `step` (from 1)."""
        return learning_rate(self.config.optimizer, self.config.train.num_steps, self.scale_ranks, step - 1)

    def _reads_at_once(self, step: int) -> bool:
        """Whether something may be due at `step`: its first line, a validation, a comparison, a save, its profile."""
        return (
            step == self.run.first_step + 1
            or self.dues.anything(step, self.standing.last)
            or self.coupling.needs_result(step)
            or self.standing.overdue
            or self.replaces
            or self.skips.needs_results
            or self.standing.validations.exhausted
            or self.profiler.torch is not None
        )

    def _finish(self, launched: Launched, *, newest: bool) -> bool:
        """Read the result of a step; validate, report and save if due. Returns whether the ranks have to stop.

        `newest`: no other step is launched yet. Otherwise a request to stop counts for that one.
        """
        step, pending = launched.step, launched.pending
        earlier = pending.read_earlier() if pending.earlier else ()
        for number, result in enumerate(earlier, step - len(earlier)):
            self._within_round(number, self._rate(number), result)
        result = pending.read()
        if not self.coupling.is_sync_point(step, stops=result.stop):
            self._within_round(step, launched.rate, replace(result, stop=False))
            return False
        changes = self.coupling.meet(step)
        if changes is not None:
            self.report.members(changes)
            self.replaces |= changes.replaces
            if changes.joined:
                self.standing.tell(self.run.world)
        if not self.coupling.knows_steps:
            result, path = self.skips.as_rank0_knows(result, lambda: str(self.run.follow()))
            self.run.path = Path(path)
            self.coupling.write_order(self.run.path)
        saves = result.stop and newest and self.generation.saves_at_stop()
        self._act(step, launched.rate, replace(result, stop=saves))
        if not result.stop and step < self.standing.last:  # else the ranks meet until they end
            if self.beside.last:
                self.beside.meet()
            if not self.coupling.knows_steps:
                self.run.world.meets(0)
        return result.stop and self.skips.back is None  # else the next generation's first step stops

    def _within_round(self, step: int, rate: float, result: StepResult) -> None:
        """What follows from a step after which the ranks do not agree: this rank's own row. No rank waits."""
        if not self.coupling.knows_steps:
            self.skips.count_alone(step, result)
        self.report.late(step, result.late)
        self.report.step(step, rate, result, Validated(), last=False)
        self.times.add(result.step_s, result.parts)

    def _act(self, step: int, rate: float, result: StepResult) -> None:
        """What follows from the result of step `step`."""
        standing, due = self.standing, self.dues.at(step, self.standing.last)
        skipped_before = standing.skipped
        if self.skips.count(step, result):  # it is undone
            return
        if standing.unproven or standing.skipped or self.saving.under_way:
            self.saving.after(step, first_skip=result.skipped and not skipped_before)
        self.report.late(step, result.late)
        if result.stop and not standing.skipped:  # save before anything else: a scheduler soon kills the process
            self.saving.save(step, None)
        found = self._validate(step) if due.validation else Validated()
        val_loss = found.loss
        if standing.validations.exhausted and not (standing.skipped or result.stop):  # else: after the next good step
            standing.last, due = step, self.dues.at(step, step)
        self._write(step, rate, result, found, line=due.line)
        if standing.skipped and self.skips.end_the_run(step, result):
            why = f"loss or gradients are not finite, skipped steps in a row: {standing.skipped}"
            raise self.saving.failed(step, why, ruined_step=standing.good, culprit=self.culprit.words)
        if result.stop:
            if self.saving.is_best(val_loss):  # replace the checkpoint that has no validation loss
                self.saving.save(step, val_loss)
        elif any(due) or standing.overdue or step == standing.last:
            self.saving.if_due(step, due, val_loss)

    def _write(self, step: int, rate: float, result: StepResult, found: Validated, *, line: bool) -> None:
        """Write the step's row, and if a `line` is due the times and the memory of all ranks."""
        with self.beside.doing(LOGGERS) if self.logs else nullcontext():
            self.report.step(step, rate, result, found, last=step == self.standing.last)
        self.times.add(result.step_s, result.parts)
        if result.stop or line:
            self.report.beside(step, self.beside.take())
            memory, world = self.trainer.executor.memory.numbers(), self.run.world
            self.report.ranks(*self.times.gather(step, peak_memory_bytes(world.device), memory, world.living))

    def _validate(self, step: int) -> Validated:
        with self.beside.doing(VALIDATION):
            found = validated(self.trainer, self.run.source("validation"), self.config.train.eval_samples)
        self.standing.validations.add(step, found.known)
        if not math.isfinite(found.known):
            self.skips.look_at_data(step)
        return found
