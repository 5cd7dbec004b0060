"""In: nothing. Out: what a strategy is: what it refuses, where it puts tensors, what it sends, how it acts.
Does not name any strategy and does not import torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from codescent.plan import Mesh, Plan, TensorPlan, Traffic, Work

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Ask:
    """What a strategy is asked for, before there is a plan: enough to refuse."""

    mesh: Mesh
    work: Work


class Gradients(Protocol):
    """The gradients of a step on their way from backward to the optimizer."""

    def before_backward(self, *, last: bool) -> None:
        """Called before each BACKWARD; `last` marks the one that completes the gradients."""

    def reduce(self, scalars: torch.Tensor) -> None:
        """The REDUCE verb: returns when gradients and `scalars` (fp64 [n]) are sums over the data-parallel ranks."""

    def collect(self) -> Sequence[torch.Tensor]:
        """The gradients, one per trainable parameter, in the module's order; valid after `reduce`."""

    def release(self) -> None:
        """Forget the gradients, after the optimizer has used them."""

    def close(self) -> None:
        """Let go of process groups and parameters, before the process groups are destroyed."""


@dataclass(frozen=True)
class Applied:
    """A module as a strategy has left it, and who looks after its gradients."""

    module: torch.nn.Module
    gradients: Gradients


class Strategy(Protocol):
    """One way of dividing the work of a step over one mesh axis."""

    axis: str
    """The mesh axis that it serves."""
    Options: type[Any]
    """Dataclass of its options; the fields are keys of the section [parallel]."""

    def __init__(self, options: Any) -> None: ...

    def refuse(self, ask: Ask) -> Iterator[str]:
        """Why it cannot serve `ask`, in the user's words, each with the nearest values that would do."""

    def place(self, tensor: TensorPlan, mesh: Mesh) -> TensorPlan:
        """The tensor with the placements and dtypes of its weights, gradients and optimizer state."""

    def traffic(self, plan: Plan) -> Iterator[Traffic]:
        """Every collective that it issues in a step of `plan` (whose own traffic is not yet complete)."""

    def apply(self, module: torch.nn.Module, groups: dict[str, ProcessGroup], plan: Plan) -> Applied:
        """Do it. `groups` holds this rank's process group of each axis; the only method that needs torch."""
