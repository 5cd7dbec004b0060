"""In: an open run, the results of its steps. Out: rows of metrics, events, and lines on the terminal.
Does not decide what a run does. Only rank 0 prints and writes; others write at most the error that ends them."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from codescent import tasks
from codescent.base import output
from codescent.base.agreement import together
from codescent.base.counted import counted
from codescent.base.errors import UserError
from codescent.base.extra import install
from codescent.base.progress import OwnPage
from codescent.base.stopping import TIME_LIMIT
from codescent.base.time_limit import in_words
from codescent.config.effects import effective
from codescent.config.load import to_toml
from codescent.coupling.membership import MembershipChange
from codescent.data.order import batch_of
from codescent.data.padding import Padding
from codescent.data.samples import PaddedSource
from codescent.hub.cache import weights_place
from codescent.huggingface.folder import open_folder
from codescent.huggingface.tokens import Controls, has_same_tokens, tokenizer_text
from codescent.record.ranks import RankRow
from codescent.train import threads
from codescent.train.board import Board
from codescent.train.continuing import ended_early, how_to_continue, schedule_is_over
from codescent.train.corpora import corpus_columns
from codescent.train.display import Display, StepShown
from codescent.train.dues import row_every
from codescent.train.fault_report import FaultReport
from codescent.train.hang_up import Regroup
from codescent.train.heal import no_majority
from codescent.train.introduction import description, drawn_weights, introduction, read_weights
from codescent.train.loggers import END, START, Failure, Logger, Loggers
from codescent.train.memory import peak_memory_bytes, row
from codescent.train.open import OpenRun
from codescent.train.outcome import GOES_ON
from codescent.train.pace import Estimate, SlowSteps
from codescent.train.predicted import Predicted
from codescent.train.recorded_error import record
from codescent.train.result import WAIT_COLUMN, StepResult
from codescent.train.stop import CALLED
from codescent.train.trackers import continue_in, trackers_of
from codescent.train.validate import Validated
from codescent.train.validations import Validations

LAST_WISH: dict[str, Any] = {"signal": None, "exit_code": 143}
"""Of a rank that wished to stop and has died since: its signal is not known. The code is that of SIGTERM."""


class Report:
    """Writes metrics and events of a run, and prints its messages.

    Args:
        run: open on this rank.
        loggers: the functions of log.to, on rank 0.
        notes: sentences that the user has been shown, to record.
    """

    def __init__(self, run: OpenRun, loggers: Sequence[Logger], notes: Sequence[str] = ()) -> None:
        self.notes, self.predicted = notes, Predicted(run)
        found = run.plan.flops()
        self.run, self.flops, self.hardware_flops = run, found.total_flops, found.hardware_flops
        self.spec_peak: float | None = (run.machine["spec"] or {}).get("peak_flops_per_s")  # of a device
        self.tokens, self.devices = run.plan.work.tokens, run.world.this_rank.world_size * run.plan.devices
        log, steps = run.config.log, run.config.train.num_steps
        self.row_every = row_every(run.config)
        self.display = Display(shown=run.world.is_first, num_steps=steps, first_step=run.first_step)
        self.faults = FaultReport(run, self.display, self._event)
        self.told = run.path  # the path of the run folder that the user knows
        self.peak: float = run.machine["peak_flops_per_s"]  # of a device
        self.has_peak = not threads.is_slowed(run.machine["peak_others"])
        self.objective, self.headline = run.plan.objective, run.plan.objective.headline
        self.padding, self.measures = _padding(run), self.objective.measures
        self.late_portions, self.goes_on = 0, False
        peak, self.slow_steps = self.peak * run.plan.devices, SlowSteps()
        number, flops = run.machine["num_threads"], self.flops / run.world.this_rank.world_size
        self.estimate = Estimate(steps - run.first_step, run.first_step, flops, peak, number, log.expected_minutes)
        self.board = Board(run.path, run.first_step, wanted=log.tensorboard is not False and run.world.is_first)
        self.loggers, self.corpora = Loggers(loggers, self._logger_failed), corpus_columns(run)
        if run.folder is not None and loggers:
            run.folder.listeners.append(self.loggers.send)

    def __enter__(self) -> Report:
        self.display.__enter__()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            record(error, self.run)
        with suppress(UserError):
            goes_on = isinstance(error, Regroup) or self.goes_on  # in the same process, or in that of another rank
            problem = None if error is None or goes_on else str(error) or repr(error)
            self.loggers.send(END, {"problem": problem, "goes_on": goes_on})
        self.board.close()
        self.display.__exit__(kind, error, trace)

    def begin(self) -> None:
        """Write environment.json and the task's files, print what is trained and on what, and warnings.

        Deletes unfinished checkpoints.
        """
        run = self.run
        for line in introduction(run):
            self.display.say(line)
        self._begin_boards()
        if run.folder is not None:
            run.folder.write_environment(run.machine)
            run.folder.write_task_files(tasks.task_of_plan(run.plan).carry(run.dataset))
        for note in self.notes:
            self._event("note", text=note)
        if run.plan.task.synthetic:
            self._event("synthetic_data", **run.dataset.description)
            self.display.warn("synthetic data: random numbers, for speed measurements; the loss has no meaning")
        for note in [*run.machine["notes"], *self.predicted.begin()]:
            self.display.say(note)
        if run.config.survive.on_divergence == "heal" and (few := no_majority(run.plan.mesh)):
            self.display.warn(few)
        if run.world.is_first:
            for left in run.checkpoints.incomplete():
                self.display.say(f"removed {left}, an unfinished checkpoint")
                self._event("incomplete_checkpoint", path=str(left))
            run.checkpoints.clean()

    def _begin_boards(self) -> None:
        """Say that TensorBoard is missing; send the description of the run to the functions of log.to."""
        if self.board.missing:
            what = f"to write them: {install('tensorboard')}; without this line: log.tensorboard = false"
            self.display.warn(f"no TensorBoard files, because tensorboard is not installed; {what}")
        trackers = trackers_of(self.loggers.loggers)
        for logger in self.loggers.loggers:
            if logger.function not in trackers:
                self.display.say(f"metrics and events also go to {logger.name} ({logger.file})")
        if trackers and self.run.folder is not None:
            continue_in(trackers, self.run.folder.read_events())
        self.loggers.send(START, description(self.run))
        for tracker in (one for one in trackers if one.where):
            self.display.say(f"metrics also go to {tracker.package}, project {tracker.project}: {tracker.where}")
            self._event("logger_started", logger=tracker.package, project=tracker.project, id=tracker.id)

    def _logger_failed(self, failure: Failure) -> None:
        """Report an exception of a function of log.to, or of a tracker."""
        then = "it is not called any more" if failure.given_up else "it is called again, and this is not repeated"
        key = "log.to = " if ":" in failure.logger else "log."  # the name of a function has a colon
        self.display.warn(
            f"warning: {key}{failure.logger} failed at {failure.call}: {failure.problem}; the run goes on, {then}"
        )
        self._event("logger_failed", **asdict(failure))

    def start(self) -> None:
        """Print and record the first step; on resume, remove from the run folder what later steps wrote."""
        run, step = self.run, self.run.first_step
        if not run.resumes:
            self._start()
            return
        removed: list[str] = []
        if run.folder is not None:
            removed += map(str, run.checkpoints.delete_after(step))
            run.folder.rewind(step)
            run.folder.write_config(to_toml(effective(run.config)), run.plan.to_json())
        self._first_event("resume", **({"changes": run.changes, "removed": removed} if run.changes else {}))
        where = run.saved.where if run.saved is not None else "step 0: there is no good checkpoint"
        self.display.say(f"resumed from {where}")
        for key, (before, now) in run.changes.items():
            self.display.say(f"{key}: {before} before, {now} from this step on")
        if (warning := schedule_is_over(run)) is not None:
            self.display.warn(warning)
        for path in removed:
            self.display.warn(f"removed {path}: training from its weights gave loss or gradients that are not finite")

    def _start(self) -> None:
        """Record and print the origin of a new run's initial weights."""
        run, named = self.run, self.run.plan.model.weights
        if named is not None and run.folder is not None:
            weights = open_folder(weights_place(named), run.plan.model)
            self._keep_controls(weights.path)
            origin, lines = read_weights(run, weights)
            self._first_event("start", weights=origin)
        else:
            lines = drawn_weights(run)
            self._first_event("start")
        for line in lines:
            self.display.say(line)

    def _keep_controls(self, weights: Path) -> None:
        """Keep the folder's control tokens for an export, unless the run has another tokenizer."""
        run = self.run
        try:
            if run.folder is not None and has_same_tokens(run.dataset.tokenizer_text, tokenizer_text(weights)):
                run.folder.write_task_files(Controls.of_folder(weights).file())
        except UserError as error:
            self.display.warn(f"its control tokens are not kept for an export: {error}")

    def step(self, step: int, rate: float, result: StepResult, found: Validated, *, last: bool) -> None:
        """Write one row of metrics and update the terminal. The `last` step has a row and a line always."""
        run, val_loss = self.run, found.loss
        if run.folder is None:
            return
        tokens, seconds = self.tokens, result.step_s
        flops_per_s = self.flops / seconds
        mfu = self._mfu(flops_per_s)
        row: dict[str, Any] = {
            "step": step,
            "train_loss": result.train_loss,
            "val_loss": val_loss,
            "learning_rate": rate,
            "grad_norm": result.grad_norm,
            "tokens": step * tokens,
            "tokens_per_s": tokens / seconds,
            "flops_per_s": flops_per_s,
            "mfu": mfu,
            "step_s": seconds,
            **result.parts,
            **({} if run.world.this_rank.world_size > 1 else {WAIT_COLUMN: None}),
            "peak_memory_bytes": peak_memory_bytes(run.world.device),
            "sent_bytes": run.plan.sent_bytes(0, step - 1) if run.world.this_rank.world_size > 1 else None,
            "consensus": result.consensus,
            **result.measured,
            **(self.objective.of_validation(val_loss) if self.headline else {}),
            "val_loss_ema": found.of_ema,
            **({} if self.corpora is None else self.corpora.values(batch_of(step - 1, run.ahead) + 1, found)),
            "padding": self.padding.share(batch_of(step - 1, run.ahead)) if self.padding else None,
            "staleness_mean": result.staleness[0] if result.staleness else None,
            "staleness_max": result.staleness[1] if result.staleness else None,
            **self._of_peaks(mfu, flops_per_s),
        }
        if last or result.stop or val_loss is not None or step % self.row_every == 0:
            run.folder.metrics(row)
        else:
            run.folder.follow()
        self._check_outputs(run.folder.path)
        due = last or step % run.config.log.every == 0
        if (due or val_loss is not None) and (why := self.board.write(row)):
            self.display.warn(why)
            self._event("output_lost", rank=0, stream="tensorboard", why=why)
        if (sentence := self.estimate.after(step)) is not None:
            self.display.say(f"{'time':<8}{sentence}")
        if (advice := self.slow_steps.add(seconds)) is not None:
            self._event("slow_steps", step=step, advice=advice)
            self.display.warn(f"step {step}: {advice}")
        peak = int(row["peak_memory_bytes"])
        slowest = "" if OwnPage.current is None else OwnPage.current.pages.slowest
        shown = StepShown(step, result.train_loss, rate, result.grad_norm, tokens / seconds, mfu, peak, slowest)
        if self.headline and (value := result.measured[self.headline]) is not None:
            shown = replace(shown, measure=f"{self.headline} {value:.4f}")
        self.display.step(shown, due=due)
        if val_loss is not None:
            self.display.validation(step, found, self.objective.of_validation(val_loss))
            if not math.isfinite(val_loss):
                self._event("validation_not_finite", step=step, val_loss=val_loss)
                self.display.warn(f"warning: step {step}: the validation loss is {val_loss}")

    def ranks(self, rows: Sequence[RankRow], memory: Sequence[list[float]]) -> None:
        """Write the times of each rank, and its memory: `MemoryWatch.numbers`."""
        if self.run.folder is not None:
            self.run.folder.write_ranks(rows)
            step, plan, both = int(rows[0]["step"]), self.run.plan, zip(rows, memory, strict=True)
            self.run.folder.write_memory([row(plan, step, int(one["rank"]), found) for one, found in both])

    def _of_peaks(self, mfu: float | None, flops_per_s: float) -> dict[str, float | None]:
        """mfu_spec and hfu of a step. `mfu`: of the step, relative to the products measured here."""
        spec = None if self.spec_peak is None else flops_per_s / (self.spec_peak * self.devices)
        return {"mfu_spec": spec, "hfu": None if mfu is None else mfu * (self.hardware_flops / self.flops)}

    def _mfu(self, flops_per_s: float) -> float | None:
        """FLOP/s of a step, relative to the products of all devices as they were measured before the first step.

        None: other programs slowed the products then. Nothing is measured again beside the steps: that would take time
        of its own, on a machine that is as busy.
        """
        return flops_per_s / (self.peak * self.devices) if self.has_peak else None

    def _check_outputs(self, path: Path) -> None:
        """Report if the run folder was renamed to `path`, or if this process could not write its standard output or
        error."""
        self.run.path = path
        if path != self.told:  # a save may have found it first
            self.display.warn(f"{self.told}: was renamed; the run continues in {path}")
            self.told = path
        if output.unreported:
            self._lost([output.new_failures()])

    def _lost(self, of_ranks: list[list[dict[str, str]]]) -> None:
        for rank, found in enumerate(of_ranks):
            for lost in found:
                self._event("output_lost", rank=rank, **lost)

    def late(self, step: int, portions: int) -> None:
        """Report that portions came too late, and do not count: a round had ended, or others have them by now."""
        if portions:
            self.late_portions += portions
            self._event("late", step=step, portions=portions)

    def members(self, changes: MembershipChange) -> None:
        """Report workers that have died, and those that have come again."""
        for lost in changes.lost:
            self._event("worker_lost", **asdict(lost))
        for joined in changes.joined:
            self._event("worker_joined", **asdict(joined))

    def beside(self, step: int, seconds: Mapping[str, float]) -> None:
        """Record what the run has done beside its steps since the last call, in seconds. Nothing: no event."""
        if seconds:
            self._event("beside", step=step, seconds=dict(seconds))

    def profiled(self, sentence: str, **fields: Any) -> None:
        """Report that a window of the profile has ended, and what is written."""
        self._event("profile", **fields)
        self.display.say(sentence)

    def saved(self, step: int, path: Path, seconds: float, *, best: bool, blocked_s: float | None = None) -> None:
        """Record that a checkpoint is complete, and lost output of every rank. Collective.

        Args:
            step, path: of the checkpoint.
            seconds: from the call to its name.
            best: it has the lowest validation loss of all checkpoints so far.
            blocked_s: of these seconds, those in which this rank did not train; None: all.
        """
        self._lost(together(UserError, output.new_failures))
        beside = {} if blocked_s is None else {"blocked_s": blocked_s}
        self._event("checkpoint", step=step, path=str(path), seconds=seconds, best=best, **beside)

    def stopped(self, step: int, received: list[dict[str, Any] | None]) -> int:
        """Report that the run has stopped on request.

        Args:
            step: the last step.
            received: `StopRequest.received` of each rank; None for a rank without a signal. If none has one, the rank
                that had it has died since.

        Returns:
            The exit code of the run.
        """
        living = zip(self.run.world.living, received, strict=True)
        asked = sorted(((rank, one) for rank, one in living if one), key=lambda pair: pair[1]["signal"] == CALLED)
        rank, first = next(iter(asked), (None, LAST_WISH))
        if first["signal"] == CALLED:
            self.goes_on = True
            self._event("regroup", step=step)
            self.display.last()
            self.display.say(f"step {step} is done: other ranks take part from now on")
            return GOES_ON
        self._event("stop", step=step, rank=rank, **first)
        by = first["signal"] if rank is not None else "the wish of a rank that has died since"
        by += in_words(os.environ) if by == TIME_LIMIT else ""
        if rank is not None and not all(received):
            by += f" to rank {rank} (process {first['process']} on {first['host']})"
        where = self.run.checkpoints.folder
        self.display.last()
        self.display.say(f"stopped at step {step} by {by}; saved in {where}; {how_to_continue(self.run)}")
        exit_code: int = first["exit_code"]
        return exit_code

    def ended(self, step: int, validations: Validations) -> None:
        """Report that all steps are done, or that `train.stop_after` has ended the run."""
        if self.run.folder is not None:
            self.run.folder.derive()
        if step < self.run.config.train.num_steps:
            count, lowest, at = validations.without_gain, validations.lowest, validations.lowest_step
            self._event("early_stop", step=step, without_gain=count, lowest_step=at, lowest_val_loss=lowest)
            self.display.last()
            self.display.say(ended_early(self.run, step, validations))
        if self.late_portions:
            what = "round" if self.run.plan.layout.average_every else "push"
            self.display.say(f"{counted(self.late_portions, what)} of workers came late and did not count")
        for line in self.predicted.end():
            self.display.say(line)
        self._event("end", step=step)

    def _first_event(self, kind: str, **fields: Any) -> None:
        writer = 0 if self.run.folder is None else self.run.folder.writer
        self._event(kind, step=self.run.first_step, writer=writer, **fields)

    def _event(self, kind: str, **fields: Any) -> None:
        if self.run.folder is not None:
            self.run.folder.event(kind, **fields)


def _padding(run: OpenRun) -> Padding | None:
    """The padding of each step, on the rank that writes it; None elsewhere, and if samples have no padding."""
    source, work = None if run.folder is None else run.source("train"), run.plan.work
    if not isinstance(source, PaddedSource):
        return None
    return Padding(source, run.plan.seed, work.global_batch_size, work.seq_len)
