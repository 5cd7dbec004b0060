"""In: skipped steps, spikes, copies that differ, saves that failed. Out: events of the run, and lines for people.
Does not decide what follows from a fault (skips.py and saving.py do). It returns the error that ends a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict

from codescent.base.counted import counted
from codescent.base.errors import RunFailed, UserError
from codescent.checkpoint.checkpoints import Saved
from codescent.train.alike import Diverged
from codescent.train.continuing import after_culprit, after_spike, lower_rates
from codescent.train.display import Display
from codescent.train.not_finite import BadGradient, named_gradients
from codescent.train.open import OpenRun
from codescent.train.result import StepResult
from codescent.train.spikes import Spike

SAMPLES_NAMED = 3
"""So many samples that are not finite are named in a line."""


class FaultReport:
    """Reports the faults of a run.

    Args:
        run: open on this rank.
        display: prints lines, on rank 0.
        event: writes an event of a kind with its fields, on rank 0.

    Attributes:
        bad_data: what is not finite in the samples of the last step, and of the skipped steps before it.
    """

    def __init__(self, run: OpenRun, display: Display, event: Callable[..., None]) -> None:
        self.run, self.display, self._event = run, display, event
        self.bad_data: list[str] = []

    def skipped(
        self, step: int, result: StepResult, culprit: str = "", updates: int = 1, found: Sequence[BadGradient] = ()
    ) -> None:
        """Report a step whose loss or gradients were not finite.

        Args:
            step: its number.
            result: of it.
            culprit: the rank that alone gave what is not finite; "": none.
            updates: that the step has; some of them may have been good.
            found: the ranks whose gradients were not finite.
        """
        gradients = [asdict(one) for one in found]
        self._event(
            "skipped_step", step=step, train_loss=result.train_loss, grad_norm=result.grad_norm, gradients=gradients
        )
        some = f"{result.skips} of {updates} updates were refused, the others have changed the weights"
        self.display.warn(
            f"step {step}: not finite (loss {result.train_loss}, norm of gradients {result.grad_norm}); "
            f"{some if 0 < result.skips < updates else 'the weights are not changed'}"
            f"{f'; of all ranks only {culprit} gave what is not finite' if culprit else ''}"
            f"{f'; {named_gradients(found)}' if found else ''}"
        )

    def skipped_before(self, step: int, count: int) -> None:
        """Report that replicas have skipped steps since they agreed before, and not the last one."""
        self._event("skipped_steps", step=step, count=count)
        self.display.warn(f"step {step}: replicas have skipped {counted(count, 'step')} that were not finite")

    def not_finite_data(self, step: int, lines: list[str]) -> None:
        """Report the samples of a step, or of its validation, that hold NaN or infinity."""
        if lines:
            self.bad_data += lines
            self._event("data_not_finite", step=step, samples=lines)
            self.display.warn(f"step {step}: the data holds NaN or infinity: {_first_of(lines)}")

    def spike(self, step: int, spike: Spike, action: str) -> None:
        """Report a spike, whose update is not applied. `action`: survive.on_spike."""
        self._event("spike", step=step, action=action, **asdict(spike))
        self.display.warn(f"step {step}: a spike: {spike}; the weights are not changed (survive.on_spike = {action})")

    def rolled_back(self, step: int, saved: Saved | None) -> None:
        """Report that the run goes back from a step to a checkpoint. The event is that of rollback.py."""
        to = 0 if saved is None else saved.step
        ahead = self.run.ahead[-1][1]
        self.display.warn(f"step {step}: back to step {to}; from there on each step takes a batch {ahead} steps later")

    def failed(self, step: int, why: str, ruined_step: int, culprit: str = "", *, spiked: bool = False) -> RunFailed:
        """Record that the run ends because the weights after `ruined_step` are bad. Returns the error to raise.

        Args:
            step: the last one.
            why: it ends.
            ruined_step: see above.
            culprit: see `skipped`; one rank alone is no fault of the optimizer. Nor is data that is not finite.
            spiked: it ends because of a spike.
        """
        good = self.run.checkpoints.newest_step(before=ruined_step) or 0
        self._event("failed", step=step, reason=why, ruined_step=ruined_step)
        self.display.last()
        ended = f"{self.run.path}: ended at step {step}, which is not saved: {why}"
        if self.bad_data:
            found = f"the data holds NaN or infinity: {_first_of(self.bad_data)}"
            return RunFailed(ended, f"{found}: mend the data, and begin a new run")
        if culprit:
            return RunFailed(f"{ended}; {after_culprit(self.run, culprit, good)}")
        return RunFailed(ended, *lower_rates(self.run, good), *(after_spike(self.run) if spiked else []))

    def diverged(self, step: int, error: Diverged) -> None:
        """Record that copies of the same tensors differ between ranks."""
        self._event("diverged", step=step, differences=[asdict(one) for one in error.differences])

    def healed(self, step: int, error: Diverged) -> None:
        """Record that copies differed between ranks, and that they have the values of a majority now."""
        self._event("healed", step=step, differences=[asdict(one) for one in error.differences])
        for one in error.differences:
            self.display.warn(
                f"step {step}: {one}; they are copied from rank {one.majority[0]} (survive.on_divergence)"
            )

    def not_saved(self, step: int, why: str) -> None:
        """Report that a checkpoint was due but is not written."""
        self._event("not_saved", step=step, reason=why)
        self.display.warn(f"step {step}: not saved, because {why}; the next good step will be saved")

    def save_failed(self, step: int, error: UserError, *, goes_on: bool = True) -> None:
        """Report that the checkpoint of a step could not be written. `goes_on`: the run does, without it."""
        self._event("save_failed", step=step, problems=list(error.problems))
        more = "; the run goes on (checkpoint.on_failed_save)" if goes_on else ""
        self.display.warn(f"step {step}: not saved: {'; '.join(error.problems)}{more}")


def _first_of(lines: list[str]) -> str:
    """The first lines, and how many more there are."""
    return "; ".join(lines[:SAMPLES_NAMED]) + (f" and {len(lines) - SAMPLES_NAMED} more" * (len(lines) > SAMPLES_NAMED))
