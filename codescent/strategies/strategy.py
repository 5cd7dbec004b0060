"""In: nothing. Out: what a strategy is: what it refuses, where it puts tensors, what it sends, how it acts.
Does not name any strategy and does not import torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from codescent.plan import Mesh, Plan, TensorPlan, Traffic, Work

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup


SCALARS = 2
"""Sums that travel beside the gradients in each step: the loss, and the wish of a rank to stop."""


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
        """The gradients of what this rank holds, one per parameter, in the module's order; valid after `reduce`."""

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

    def traffic(self, plan: Plan) -> Iterator[Traffic]:
        """Every collective that it issues in a step of `plan` (whose own traffic is not yet complete)."""

    def divide(self, module: torch.nn.Module, groups: dict[str, ProcessGroup], plan: Plan) -> None:
        """Change the module, while its parameters are on the meta device and take no memory, into this rank's part.

        `groups` holds this rank's process group of each axis. This and `gradients` are what needs torch.
        """

    def gradients(self, module: torch.nn.Module, groups: dict[str, ProcessGroup], plan: Plan) -> Gradients | None:
        """Who looks after the gradients of the module, whose parameters now have memory; None: another strategy."""
