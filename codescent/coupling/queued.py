"""In: work that a rank is given, portion by portion. Out: the part that all couplings with such work have in common.
Does not choose the work: the work queue (work_queue.py) of the first server, or of rank 0, does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from codescent.coupling.coupling import Coupling, StepSums
from codescent.coupling.pushes import Step
from codescent.coupling.services import Services, WeightUpdater
from codescent.data.loader import Loader
from codescent.data.loader import Portion as Samples
from codescent.plan import Plan
from codescent.servers import Portion


@dataclass
class Known:
    """What the rank that gives out the work has said of the run.

    Attributes:
        done: number of complete steps.
        ends: the segment is over: all ranks act now.
        stops: a rank was asked to stop, and the segment is over.
    """

    done: int = 0
    ends: bool = True
    stops: bool = False


class Queued(Coupling):
    """A rank that is given portions of work. A work item is one portion, or one step of it.

    Attributes:
        known: what this rank knows of the run.
        portion: that it computes now; None: it has to ask for one.
        step: of the present work item.
        sums: of the steps that have become complete since the last `result`: see `Step.sums` of pushes.py.
    """

    knows_steps: ClassVar[bool] = False
    why_unheld = "work is given out, and what a lost rank knew of it is nowhere else"

    def __init__(self, plan: Plan, optimizer: WeightUpdater, services: Services) -> None:
        super().__init__(plan, optimizer, services)
        self.begin_work()

    def begin_work(self) -> None:
        """Nothing is given yet. All state of this class is made here: PairedReplicas calls it itself."""
        self.known = Known(self.services.first_step)
        self.portion: Portion | None = None
        self.step = self.services.first_step
        self.sums: list[list[float]] = []

    def read(self, loader: Loader | None) -> tuple[Samples, int] | None:
        """See Coupling."""
        assert loader is not None
        assert self.portion is not None
        part, parts = self.portion.part, self.plan.mesh.dp
        own = self.plan.mesh.dp_index(self.services.rank)
        first = (part - own) * (self.plan.work.global_batch_size // parts)
        return loader.part(self.step, part, parts), first

    def result(self, number: int) -> StepSums:
        """See Coupling: the last complete step, as the rank knows it that gives out the work."""
        found, self.sums = self.sums, []
        return told(found, self.known.done, stops=self.known.stops)


def told(steps: list[list[float]], done: int, *, stops: bool) -> StepSums:
    """What is known of steps by their sums.

    Args:
        steps: see `Step.sums`; empty: no step has become complete.
        done: number of complete steps.
        stops: a rank was asked to stop.
    """
    *earlier, last = steps or [Step().sums]
    loss, _, square, skips, stale, most_stale, losses, culprit, late = last
    values = torch.tensor([loss, float(stops), square, skips], dtype=torch.float64)
    return StepSums(values, int(losses) or 1, done, (stale, int(most_stale)), earlier, int(late), int(culprit))
