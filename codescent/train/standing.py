"""In: results of steps, validations, saves. Out: what all ranks know of the run, and decide by.
Does not act on it (loop.py and saving.py do)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from codescent.train.validations import Validations
from codescent.train.world import World


@dataclass
class Standing:
    """How a run stands. Every rank has the same values, because all read the same results.

    Attributes:
        good: the last step that all ranks know, and none has skipped.
        last: the last step of the run; an early end makes it smaller.
        validations: so far.
        skipped: consecutive skipped steps, up to the current one.
        overdue: a checkpoint was due at a step that could not be saved: the next good step is saved.
        unproven: no finite step has followed the newest checkpoint yet, so older checkpoints stay.
    """

    good: int
    last: int
    validations: Validations
    skipped: int = 0
    overdue: bool = False
    unproven: bool = False

    def back_to(self, step: int, validations: Validations, last: int) -> None:
        """The run stands as after `step`. `validations`: before any; `last`: the last step of the run."""
        self.good, self.last, self.validations = step, last, validations
        self.skipped, self.overdue, self.unproven = 0, False, False

    def tell(self, world: World) -> None:
        """Those who have come late learn what the others know. Collective."""
        known: list[Any] = [self.good, self.overdue, self.unproven, self.last, asdict(self.validations)]
        *known, validations = world.from_first(lambda: known)
        self.good, self.overdue, self.unproven, self.last = known
        self.validations = Validations(**validations)
