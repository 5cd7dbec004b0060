"""In: nothing. Out: the base class of strategies, and what a strategy is given to decide and to act upon.
Does not name any strategy and does not import torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from codescent.plan import Layout, Mesh, ModelFacts, Plan, Schedule, TaskFacts, TensorPlan, Traffic, Work

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Candidate:
    """A plan before it is made: enough to refuse it, and to find the nearest one that can be made.

    `world_size` counts the ranks of the run. `microbatch_size` is the user's; None: all of a rank's samples.
    """

    mesh: Mesh
    model: ModelFacts
    task: TaskFacts
    work: Work
    layout: Layout
    world_size: int
    microbatch_size: int | None

    def on(self, mesh: Mesh) -> Candidate | None:
        """This candidate on another mesh; None where the batch does not divide among its ranks."""
        share, rest = divmod(self.work.global_batch_size, mesh.dp)
        size = self.microbatch_size or share
        if rest or share % size:
            return None
        work = replace(self.work, microbatch_size=size, num_microbatches=share // size)
        return replace(self, mesh=mesh, work=work)


@dataclass(frozen=True)
class ThisRank:
    """A rank of a plan, with its process group of each axis that the plan's traffic names."""

    plan: Plan
    rank: int
    groups: Mapping[str, ProcessGroup]

    @property
    def coordinates(self) -> dict[str, int]:
        """Index of this rank on each axis of the mesh."""
        return self.plan.mesh.coordinates(self.rank)

    @property
    def tensors(self) -> tuple[TensorPlan, ...]:
        """The tensors of this rank's pipeline stage."""
        return self.plan.held_by(self.coordinates["pp"])

    @property
    def trained(self) -> tuple[TensorPlan, ...]:
        """The tensors of this stage that are updated; empty where all adapters are on other stages."""
        return tuple(tensor for tensor in self.tensors if tensor.parameter.trained)


class Gradients(Protocol):
    """The gradients of a step on their way from backward to the optimizer."""

    def before_backward(self, *, last: bool, chunk: int = 0) -> None:
        """Called before each backward pass of a chunk; `last` marks the one that completes the chunk's gradients."""

    def reduce(self) -> None:
        """The REDUCE verb: returns when the gradients are sums over all the ranks that know a part of them."""

    def collect(self) -> Sequence[torch.Tensor]:
        """One gradient per trained tensor of this rank's stage, in the plan's order; valid after `reduce`."""

    def release(self) -> None:
        """Forget the gradients, after the optimizer has used them."""

    def close(self) -> None:
        """Let go of process groups and parameters, before the process groups are destroyed."""


class Strategy:
    """One way of dividing the work of a step over one mesh axis; without state: it reads its keys from the layout.

    The methods of this class change nothing. `variants` are values of layout keys that change what it does, not only
    how fast: `prove` tries each.
    """

    axis: ClassVar[str] = ""  # of the mesh; "" where it divides nothing
    variants: ClassVar[tuple[Mapping[str, Any], ...]] = ()

    def serves(self, run: Candidate | Plan) -> bool:
        """Whether the run uses it. Where it does not, `place`, `schedule`, `traffic` and `divide` are not called."""
        return run.mesh.degree(self.axis) > 1

    def refuse(self, candidate: Candidate) -> Iterator[str]:
        """Why it cannot serve `candidate`, in the user's words, each with the nearest values that would do."""
        yield from ()

    def place(self, tensor: TensorPlan, candidate: Candidate) -> TensorPlan:
        """The tensor with the placements and dtypes of its weights, gradients and optimizer state."""
        return tensor

    def schedule(self, schedule: Schedule, candidate: Candidate) -> Schedule:
        """The instruction lists of the strategies before it in ORDER, with its own changes."""
        return schedule

    def traffic(self, plan: Plan, stage: int) -> Iterator[Traffic]:
        """Every collective that a rank of a pipeline stage issues in a step; the caller fills in `Traffic.stage`."""
        yield from ()

    def divide(self, part: torch.nn.Module, this_rank: ThisRank) -> None:
        """Change a chunk of the model, its parameters on the meta device, into what this rank holds of it."""

    def gradients(
        self, parts: Sequence[torch.nn.Module], this_rank: ThisRank, owner: Gradients | None
    ) -> Gradients | None:
        """The owner of the chunks' gradients, once parameters have memory. Asked of every strategy, in ORDER.

        `owner` is that of the strategies before it: return it, wrap it, or make one where it is None.
        """
        return owner
