"""In: nothing. Out: what a strategy is: what it refuses, where it puts tensors, what it does when, how it acts.
Does not name any strategy and does not import torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from codescent.plan import Mesh, Plan, Schedule, TensorPlan, Traffic, Work

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Ask:
    """What a strategy is asked for, before there is a plan: enough to refuse, and to say what would do.

    `world_size`: ranks of the run. `microbatch_size`: as the user gave it; None: all of a rank's samples.
    """

    mesh: Mesh
    work: Work
    world_size: int
    microbatch_size: int | None

    def on(self, mesh: Mesh) -> Ask | None:
        """The same asked of another mesh; None where the batch does not divide among its ranks."""
        share, rest = divmod(self.work.global_batch_size, mesh.dp)
        size = self.microbatch_size or share
        if rest or share % size:
            return None
        work = replace(self.work, microbatch_size=size, num_microbatches=share // size)
        return replace(self, mesh=mesh, work=work)


@dataclass(frozen=True)
class Here:
    """Where a strategy acts: a rank of a plan, and its process group of each axis that the plan's traffic names."""

    plan: Plan
    rank: int
    groups: Mapping[str, ProcessGroup]

    @property
    def coordinates(self) -> dict[str, int]:
        """Place of this rank on each axis."""
        return self.plan.mesh.coordinates(self.rank)

    @property
    def tensors(self) -> tuple[TensorPlan, ...]:
        """Those of this rank's pipeline stage."""
        return self.plan.held_by(self.coordinates["pp"])

    @property
    def trained(self) -> tuple[TensorPlan, ...]:
        """Those of them that are updated; none perhaps, where adapters are on other stages alone."""
        return tuple(tensor for tensor in self.tensors if tensor.parameter.trained)


class Gradients(Protocol):
    """The gradients of a step on their way from backward to the optimizer."""

    def before_backward(self, *, last: bool, chunk: int = 0) -> None:
        """Called before each backward pass of a chunk; `last` marks the one that completes the chunk's gradients."""

    def reduce(self) -> None:
        """The REDUCE verb: returns when the gradients are sums over all the ranks that know a part of them."""

    def collect(self) -> Sequence[torch.Tensor]:
        """The gradients of what this rank holds, one per trained tensor of its stage, in the plan's order; valid after
        `reduce`."""

    def release(self) -> None:
        """Forget the gradients, after the optimizer has used them."""

    def close(self) -> None:
        """Let go of process groups and parameters, before the process groups are destroyed."""


class Strategy(Protocol):
    """One way of dividing the work of a step over one mesh axis."""

    axis: str
    """The mesh axis that it serves; "" where it divides nothing."""
    Options: type[Any]
    """Dataclass of its options; the fields are keys of the section [parallel]."""
    variants: tuple[Mapping[str, Any], ...]
    """Values of options that change what it does, not only how fast: each is to be proved."""

    def __init__(self, options: Any) -> None: ...

    def refuse(self, ask: Ask) -> Iterator[str]:
        """Why it cannot serve `ask`, in the user's words, each with the nearest values that would do."""

    def place(self, tensor: TensorPlan, ask: Ask) -> TensorPlan:
        """The tensor with the placements and dtypes of its weights, gradients and optimizer state."""

    def schedule(self, schedule: Schedule, ask: Ask) -> Schedule:
        """The instruction lists, as those before it in ORDER have left them, with what it does differently."""

    def traffic(self, plan: Plan) -> Iterator[Traffic]:
        """Every collective that it issues in a step of `plan` (whose own traffic is not yet complete)."""

    def divide(self, part: torch.nn.Module, here: Here) -> None:
        """Change one chunk of the model, while its parameters are on the meta device and take no memory, into what this
        rank holds of it. This and `gradients` are what needs torch."""

    def gradients(self, parts: Sequence[torch.nn.Module], here: Here) -> Gradients | None:
        """Who looks after the gradients of the chunks, whose parameters now have memory; None: another strategy.

        In every layout exactly one does.
        """
