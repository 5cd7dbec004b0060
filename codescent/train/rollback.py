"""In: a spike, and the checkpoints of a run. Out: the checkpoint to go back to, recorded in the run folder.
Does not load it: the next generation does (generation.py). A resumed run reads the record."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from codescent.checkpoint.checkpoints import Saved
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
        found: dict[str, Any] = run.world.from_first(lambda: self._look(step - keys.rollback_steps))
        to = found["step"]
        if sum(after == to for after in found["before"]) >= MOST:
            return None
        number = (run.ahead[-1][1] if run.ahead else 0) + step - to + keys.skip_batches - 1
        run.world.from_first(lambda: self._record(step, to, number))
        run.ahead = after_rollback(run.ahead, to, number)
        self.standing.back_to(to, Validations(run.config.train.stop_after), run.config.train.num_steps)
        self.standing.validations.read(run)
        saved = found["saved"]
        return RestartPoint(None if saved is None else Saved(**{**saved, "path": Path(saved["path"])}))

    def _look(self, newest: int) -> dict[str, Any]:
        """The newest checkpoint of at most `newest` steps, and where rollbacks went before. On rank 0."""
        assert self.run.folder is not None
        saved = self.run.checkpoints.latest(before=newest + 1) if newest >= 0 else None
        before = [event["to"] for event in self.run.folder.read_events() if event["kind"] == ROLLBACK]
        if saved is None:
            return {"step": 0, "saved": None, "before": before}
        return {"step": saved.step, "saved": {**vars(saved), "path": str(saved.path)}, "before": before}

    def _record(self, step: int, to: int, number: int) -> None:
        folder = self.run.folder
        assert folder is not None
        folder.event(ROLLBACK, step=step, to=to, ahead=number)
        self.run.checkpoints.delete_after(to)
        folder.rewind(to)
