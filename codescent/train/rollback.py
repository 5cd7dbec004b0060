"""In: a spike, and the checkpoints of a run. Out: the checkpoint to go back to, recorded in the run folder.
Does not load it: the next generation does (generation.py). A resumed run reads the record."""

from __future__ import annotations

from dataclasses import dataclass

from codescent.checkpoint.checkpoints import Saved
from codescent.train.newest import newest
from codescent.train.rolled_back import ROLLBACK, after_rollback
from codescent.train.saving import Saving
from codescent.train.validations import Validations

MOST = 10
"""A run ends at the next spike after so many rollbacks to the same step."""


@dataclass(frozen=True)
class RestartPoint:
    """Where the next generation begins. None: at step 0, as the run has begun."""

    saved: Saved | None


class Rollback:
    """Goes back to a checkpoint.

    The checkpoint, and no copy in memory: a resumed run begins there too, so both take the same way; and weights and
    state need no second place.

    Args:
        saving: of the run; it completes the save that is under way, so that the choice does not depend on its speed.
    """

    def __init__(self, saving: Saving) -> None:
        self.run, self.saving, self.standing = saving.run, saving, saving.standing

    def before(self, step: int) -> RestartPoint | None:
        """Go back from step `step`; None: that was done too often. Collective.

        Records it first, then removes what later steps have written. A resumed run can begin between the two.
        """
        run, keys = self.run, self.run.config.survive
        self.saving.settle(step)
        run.all_follow()
        most, falls_back = step - keys.rollback_steps, run.config.checkpoint.fall_back
        saved = newest(run.checkpoints, run.world, most + 1, run.folder, falls_back=falls_back) if most >= 0 else None
        to = 0 if saved is None else saved.step
        if run.world.from_first(lambda: self._times(to)) >= MOST:
            return None
        number = (run.ahead[-1][1] if run.ahead else 0) + step - to + keys.skip_batches - 1
        run.world.from_first(lambda: self._record(step, to, number))
        run.ahead = after_rollback(run.ahead, to, number)
        self.standing.back_to(to, Validations(run.config.train.stop_after), run.config.train.num_steps)
        self.standing.validations.read(run)
        return RestartPoint(saved)

    def _times(self, to: int) -> int:
        """How often the run has gone back to a step. On rank 0."""
        assert self.run.folder is not None
        return sum(event["kind"] == ROLLBACK and event["to"] == to for event in self.run.folder.read_events())

    def _record(self, step: int, to: int, number: int) -> None:
        folder = self.run.folder
        assert folder is not None
        folder.event(ROLLBACK, step=step, to=to, ahead=number)
        self.run.checkpoints.delete_after(to)
        folder.rewind(to)
