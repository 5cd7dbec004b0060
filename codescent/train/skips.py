"""In: results of steps, some of which were skipped. Out: how many in a row, who gave what is not finite, what is said.
Does not skip a step (optimize.py), go back (rollback.py), or find whose portions they are (coupling/)."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from codescent.base.agreement import together
from codescent.base.errors import UserError
from codescent.meeting.store import Store
from codescent.train.generation import Generation
from codescent.train.not_finite import BadGradient, bad_gradients
from codescent.train.result import StepResult
from codescent.train.rollback import MOST, RestartPoint, Rollback
from codescent.train.saving import Saving
from codescent.train.spikes import Spike
from codescent.train.stop import StopRequest

SKIPS_ALLOWED = 10
"""The run ends after this many consecutive steps whose loss or gradients are not finite. All ranks skip such steps."""


class Culprit:
    """Who gave what is not finite in all steps that were skipped in a row.

    Args:
        store: of all ranks, with the host of each.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.found: list[int] = []
        """One more than a rank; 0: several ranks, or an unknown one. Of each skipped step, equal ones once."""

    def note(self, result: StepResult, before: int, steps: int = 1) -> int:
        """A step is complete. Returns the number of skipped steps in a row.

        After SKIPS_ALLOWED of them the run ends, even if work that was given out before gives a finite step.

        Args:
            result: of the step.
            before: skipped steps in a row before it.
            steps: as many as it counts for, if it was skipped.
        """
        if result.skipped:
            self.found = sorted({*self.found, result.culprit})
            return before + steps
        if before < SKIPS_ALLOWED:
            self.found = []
            return 0
        return before

    @property
    def words(self) -> str:
        """Such as "rank 2 (on node1)"; "": it was not the same one in all steps, or nobody knows."""
        return self.of(self.found[0]) if len(self.found) == 1 else ""

    def of(self, culprit: int) -> str:
        """The same for a step. `culprit`: see StepResult."""
        if not culprit:
            return ""
        host = json.loads(self._store.get(f"rank{culprit - 1}"))["host"]
        return f"rank {culprit - 1} (on {host})"


class Skips:
    """The steps that were skipped in a row, up to the present one.

    Args:
        generation: its executor notes what the samples have, and its spikes refuse updates.
        saving: of the run, whose standing has the number; a rollback completes its save.
        culprit: of the steps that were skipped.
        stop: has all ranks meet, where only rank 0 knows that the run ends.

    Attributes:
        needs_results: whether a step can be refused for what its numbers are, so that the next one has to wait.
        back: where the next generation begins; None: this one goes on.
    """

    def __init__(self, generation: Generation, saving: Saving, culprit: Culprit, stop: StopRequest) -> None:
        self.executor, self.spikes = generation.trainer.executor, generation.spikes
        self.saving, self.report, self.standing = saving, saving.report.faults, saving.standing
        self.culprit, self.stop = culprit, stop
        self.rollback = Rollback(saving)
        self.needs_results = self.spikes.looks
        self.back: RestartPoint | None = None

    def count_alone(self, step: int, result: StepResult) -> None:
        """Count a step of which this rank was told alone. Rank 0 is told of each, and has all ranks meet at last."""
        self.standing.skipped = self.culprit.note(result, self.standing.skipped)
        self.stop.must_meet |= self.executor.world.is_first and self.standing.skipped >= SKIPS_ALLOWED
        if result.skipped:
            self._say(step, result)

    def end_the_run(self, step: int, result: StepResult) -> bool:
        """Whether a skipped step ends the run: they are too many, or it is the last one. Collective of a stop."""
        too_many = step == self.standing.last or self.standing.skipped >= SKIPS_ALLOWED
        return too_many or (result.stop and self.stop.is_final())

    def count(self, step: int, result: StepResult) -> bool:
        """Count a step of which all ranks know. Collective if it was skipped. Returns whether it is undone: see `back`.

        Of a round whose last step was skipped, as many steps count as each replica has skipped, at least one.
        """
        spike = None if result.skipped else self.spikes.found
        self.standing.refused = spike is not None
        if spike is not None:
            self._spiked(step, result, spike)
            return self.back is not None
        each = self.executor.coupling.skips_of_each(result.skips) if result.skipped else 1
        self.standing.skipped = self.culprit.note(result, self.standing.skipped, each)
        if result.skipped:
            self._say(step, result, bad_gradients(self.executor, step) if self.executor.coupling.knows_steps else [])
            self.look_at_data(step)
        elif not self.standing.skipped:
            self.report.bad_data.clear()
            self.standing.good = step
            if result.skips:
                self.report.skipped_before(step, result.skips)
        return False

    def _spiked(self, step: int, result: StepResult, spike: Spike) -> None:
        """What follows from a spike. No rank has updated its weights. Collective.

        Raises RunFailed: the run stops at spikes, or too many have followed each other.
        """
        action = self.spikes.keys.on_spike
        self.report.spike(step, spike, action)
        why = f"a spike: {spike}"
        if action == "skip" and self.spikes.in_row >= SKIPS_ALLOWED:
            why = f"{why}; spikes in a row: {self.spikes.in_row}"
            raise self.saving.failed(step, why, ruined_step=self.standing.good, spiked=True)
        if action == "rollback":
            self.back = self.rollback.before(step)
            if self.back is not None:
                self.report.rolled_back(step, self.back.saved)
                return
            action, why = "stop", f"{why}; it went back to the same step {MOST} times"
        if action == "stop":
            raise self.saving.failed(step, why, ruined_step=step, spiked=True)
        self.standing.skipped = self.culprit.note(result, self.standing.skipped)

    def _say(self, step: int, result: StepResult, found: Sequence[BadGradient] = ()) -> None:
        culprit, updates = self.culprit.of(result.culprit), self.executor.coupling.updates
        self.report.skipped(step, result, culprit, updates, found)

    def look_at_data(self, step: int) -> None:
        """Say what is not finite in the samples of the steps up to `step`, on every rank. Collective."""
        read, rank = self.executor.bad_data, self.executor.world.this_rank.rank
        lines = [f"rank {rank}: {what}" for number in sorted(read) if number <= step for what in read.pop(number)]
        self.report.not_finite_data(step, [line for of_rank in together(UserError, lambda: lines) for line in of_rank])

    def as_rank0_knows(self, result: StepResult, path: Callable[[], str]) -> tuple[StepResult, str]:
        """The result of a step of which only rank 0 was told, on all ranks. Collective.

        Others may count updates in another order. Rank 0 alone knows if the run folder was renamed, too.

        Args:
            result: as this rank knows it.
            path: of the run folder, on rank 0.
        """
        assert result.staleness is not None
        mean, most = result.staleness
        known: list[Any] = [result.train_loss, result.grad_norm, mean, most, result.skips, result.culprit]
        known += [self.standing.skipped, self.culprit.found]
        world = self.executor.world
        *known, where = world.from_first(lambda: [*known, path()])
        loss, norm, mean, most, skips, culprit, self.standing.skipped, self.culprit.found = known
        stop = not world.all_agree(not result.stop)
        result = replace(result, train_loss=loss, grad_norm=norm, skips=skips, stop=stop)
        return replace(result, staleness=(mean, most), culprit=culprit), where
