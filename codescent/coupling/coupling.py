"""In: a plan, a rank, its optimizer. Out: `Coupling`, with whom a rank takes which steps; this one: with all others.
Does not compute a step (train/execute.py does). Other couplings are in this room; `of` in __init__.py chooses one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

import torch

from codescent.checkpoint.box import Box
from codescent.coupling.membership import MembershipChange
from codescent.coupling.services import Services, WeightUpdater
from codescent.data.loader import Loader, Portion
from codescent.plan import AXES, Instruction, Plan, Verb
from codescent.strategies import Gradients

Arms = Mapping[Verb, Callable[[Instruction], None]]


@dataclass(frozen=True)
class WorkItem:
    """One walk of an instruction list.

    Attributes:
        step: whose samples are computed (from 0).
        listed: the step whose instructions are walked.
        rate: learning rate.
    """

    step: int
    listed: int
    rate: float


@dataclass(frozen=True)
class StepSums:
    """What a rank knows when it has done a step.

    Attributes:
        values: loss, ranks that were asked to stop, the measures of the objective, and squared norm, of all ranks;
            fp64. At a sync point of replicas also skipped steps, squared distance from the mean, and the squared norm
            of the mean.
        losses: the number of losses in the sum.
        done: number of complete steps.
        staleness: mean and largest number of versions between the weights of a gradient and those that it changed;
            None: weights are never older.
        earlier: the sums of steps that have become complete with this one, before it: see `Step.sums` of pushes.py.
        late: portions that came too late, and did not count.
        culprit: 1 more than the rank that alone gave what is not finite; 0: none, several, or nobody knows.
        measured: how many of the values are of measures (`Plan.measured`).
    """

    values: torch.Tensor
    losses: int
    done: int
    staleness: tuple[float, int] | None = None
    earlier: Sequence[Sequence[float]] = ()
    late: int = 0
    culprit: int = 0
    measured: int = 0


class Present(Protocol):
    """What a coupling sees of the step that is computed: see `Executor`.

    Attributes:
        number: of the step (from 0).
        rate: learning rate.
        portion: the samples of this rank.
        sums: of the optimizer's last update: what `Coupling.agree` gave.
        loss_sum: of the portion, [].
        measured: the sums and counts of the objective's measures of the portion, [`Plan.measured`].
        gradients: of this rank.
    """

    number: int
    rate: float
    portion: Portion
    sums: torch.Tensor
    loss_sum: torch.Tensor
    measured: torch.Tensor
    gradients: Gradients
    stop_requested: Callable[[], bool]

    def own(self) -> torch.Tensor:
        """This rank's loss, if it is counted, whether it was asked to stop, and the measures of its samples, if they
        are counted; fp64, [2 + `Plan.measured`]."""


class Coupling:
    """With whom a rank takes which steps. Here: every rank takes every step with all others.

    Args:
        plan: of the run.
        optimizer: of the weights that this rank updates in the STEP verb.
        services: what the run gives a coupling.

    Attributes:
        verbs: what this coupling does in the verbs that are its own.
        knows_steps: whether each rank hears of every step. False: only rank 0 does, and tells the others where they
            meet. Then work is given out, portion by portion, and nobody knows its samples before.
        why_unheld: why the ranks that are left, when one is lost, cannot go on from the tensors in their memory. "":
            they can, and `tensors` is no collective.
    """

    knows_steps: ClassVar[bool] = True
    why_unheld: ClassVar[str] = ""
    at: Present

    def __init__(self, plan: Plan, optimizer: WeightUpdater, services: Services) -> None:
        self.plan, self.optimizer, self.services = plan, optimizer, services
        self.everyone = plan.mesh.joint(*AXES)
        self.verbs: Arms = {}

    def bind(self, at: Present) -> None:
        """The executor with whose steps this coupling works."""
        self.at = at

    # --- a step

    def work(self, number: int, rate: float) -> Iterator[WorkItem]:
        """The work of this rank until step `number` (from 0), of learning rate `rate`, is done. Each item is computed
        before the next one is asked for."""
        yield WorkItem(number, number, rate)

    def read(self, loader: Loader | None) -> tuple[Portion, int] | None:
        """The samples of the present work item, and the index of the first one, relative to this rank's own.
        None: it computes nothing."""
        assert loader is not None
        return loader.next(), 0

    def divisor(self) -> int:
        """The number of losses whose mean the step minimises."""
        return self.at.portion.losses

    def sum_gradients(self, gradients: Sequence[torch.Tensor]) -> None:
        """REDUCE over an axis that the instruction names, in place."""
        raise NotImplementedError(f"{type(self).__name__} sums no gradients")

    def agree(self, square: torch.Tensor) -> torch.Tensor:
        """Sum what the ranks have of their own (`Present.own`), and this rank's squared norm, over those who update
        together: [SCALARS + `Plan.measured`]."""
        return self._with_own(square, self.everyone)

    def _with_own(self, square: torch.Tensor, axis: str) -> torch.Tensor:
        own = self.at.own()
        return self.services.ranks.sum_over(torch.cat((own, square.to(own.device)[None])), axis)

    def stepped(self) -> None:
        """The optimizer has updated the weights: the STEP verb is done."""

    def result(self, number: int) -> StepSums:
        """What is known when step `number` (from 0) is done."""
        return StepSums(self.at.sums, self.at.portion.losses, number + 1, measured=len(self.at.measured))

    # --- between steps

    def is_sync_point(self, step: int, *, stops: bool = False) -> bool:
        """Whether all ranks act together after step `step` (from 1). `stops`: a rank was asked to stop. Where work is
        given out, none is given any more then, so the ranks meet early."""
        return self.plan.schedule.agrees_after(step) or (stops and not self.knows_steps)

    def needs_result(self, step: int) -> bool:
        """Whether what follows step `step` (from 1) depends on its result: always, where work is given out."""
        return not self.knows_steps

    @property
    def updates(self) -> int:
        """The updates of a step: one of all ranks together, or one of each rank."""
        return self.plan.mesh.world_size if self.plan.layout.updates_alone else 1

    def skips_of_each(self, skips: int) -> int:
        """How many steps in a row a skipped step stands for. `skips`: those that replicas have skipped, summed."""
        return max(1, skips // self.plan.mesh.dp_replicate) if self.plan.apart else 1

    def meet(self, step: int) -> MembershipChange | None:
        """All ranks meet after step `step` (from 1): who has died, and who has come. None: nobody. Collective."""
        return None

    def begin(self, run: Path, first_step: int) -> None:
        """The run goes on after so many steps. What was written in its folder beyond them is removed."""

    def join(self) -> int:
        """Come in while others train. Returns the number of steps that are done."""
        raise NotImplementedError(f"{type(self).__name__}: no rank comes late")

    def write_order(self, run: Path) -> None:
        """Write into the run's folder in which order this rank has applied what others sent. Where work is given out:
        else the order is that of the steps."""

    # --- checkpoints and memory

    def tensors(self) -> dict[str, torch.Tensor | Box]:
        """Weights and optimizer state of a checkpoint, by name. Collective where replicas have different weights."""
        return self.optimizer.tensors()

    def means(self) -> Sequence[torch.Tensor] | None:
        """The mean over replicas of each weight; None: there is one value. Collective."""
        return None

    def state(self) -> Mapping[str, torch.Tensor]:
        """What it keeps between steps, by the names of `Plan.kept`."""
        return {}

    def optimizers(self) -> Sequence[WeightUpdater]:
        """All optimizers of this rank, each once."""
        return (self.optimizer,)

    def buffers(self) -> Iterator[torch.Tensor]:
        """Memory that it holds beside its state, to count it."""
        yield from ()

    def close(self) -> None:
        """Disconnect, and drop all references to process groups."""
