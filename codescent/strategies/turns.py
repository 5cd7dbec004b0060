"""In: the work that a rank is given, portion by portion. Out: what the executor asks of such a rank, in each step.
Does not choose the work (the first server, or rank 0, does) and does not compute (train/execute.py does)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from codescent.servers import Portion
from codescent.strategies.strategy import Gradients


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


class Turns(ABC):
    """A rank that is given portions of work: see `Executor.worker`. A turn is one walk of the instruction list.

    Attributes:
        known: what this rank knows of the run.
        portion: that it computes now; None: it has to ask for one.
        step: of the present turn.
        sums: of the steps that have become complete since the last `news`: see `Step.sums` of train/serve.py.
    """

    def __init__(self, first_step: int) -> None:
        self.known = Known(first_step)
        self.portion: Portion | None = None
        self.step = first_step
        self.sums: list[list[float]] = []

    @abstractmethod
    def turns(self, number: int) -> Iterator[None]:
        """A turn for each portion that this rank computes until step `number` (from 0) is complete."""

    def listed(self, number: int) -> int:
        """The step whose instructions the present turn has, while the executor takes step `number`."""
        return number

    def rate(self, rate: float) -> float:
        """The learning rate of the present turn, where the executor's step has `rate`."""
        return rate

    def push(self, gradients: Gradients, loss: torch.Tensor, losses: int, *, stop: bool) -> None:
        """The PUSH verb: send what was computed to the servers.

        Args:
            gradients: of the portion.
            loss: sum of its losses, [].
            losses: their number.
            stop: this rank was asked to stop.
        """
        raise NotImplementedError(f"{type(self).__name__} has no servers")

    def pull(self) -> None:
        """The PULL verb: fetch the weights of all servers, then the next portion."""
        raise NotImplementedError(f"{type(self).__name__} has no servers")

    def stepped(self, sums: torch.Tensor, losses: int) -> None:  # noqa: B027 - most ranks have nothing to note
        """This rank has updated its weights itself. `sums` [SCALARS]; `losses`: their number."""

    def finished(self, sums: torch.Tensor, losses: int) -> None:  # noqa: B027 - most ranks have nothing to note
        """The turn is over. `sums` [SCALARS]: loss, requests to stop, squared norm; `losses`: their number."""

    def meet(self) -> torch.Tensor | None:
        """Distance of the replicas, where they have met at the end of a segment."""
        return None

    def news(self) -> list[list[float]]:
        """The sums of each step that has become complete since the last call; ranks but 0 know some of them."""
        found, self.sums = self.sums, []
        return found

    def state(self) -> Mapping[str, torch.Tensor]:
        """What it keeps between steps, by the names of `Plan.kept`."""
        return {}

    @abstractmethod
    def buffers(self) -> Iterator[torch.Tensor]:
        """The memory that it holds beside its state."""

    @abstractmethod
    def close(self) -> None:
        """Disconnect."""
