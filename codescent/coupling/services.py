"""In: nothing. Out: what a coupling is given by the run that it is part of: ranks to meet, weights, an optimizer.
Does not make them: train/assemble.py does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from codescent.base.progress import Pages
from codescent.base.rank import Rank
from codescent.checkpoint.box import Box
from codescent.meeting.store import Store
from codescent.plan import Plan
from codescent.strategies.strategy import ThisRank


class TrainedWeight(Protocol):
    """A trained tensor of this rank: see train/optimize.py."""

    @property
    def name(self) -> str:
        """Of the parameter."""

    @property
    def tensor(self) -> torch.Tensor:
        """The weights that forward reads."""

    @property
    def master(self) -> torch.Tensor:
        """The weights that the optimizer updates."""

    @property
    def counted(self) -> bool:
        """Whether this rank counts the tensor in sums over its replica."""

    def named(self, value: torch.Tensor) -> torch.Tensor | Box:
        """A tensor of a checkpoint: a Box if it is a shard."""


class WeightUpdater(Protocol):
    """What updates weights: see train/optimize.py."""

    @property
    def weights(self) -> Sequence[TrainedWeight]:
        """In the plan's order."""

    def step(
        self, gradients: Sequence[torch.Tensor], rate: float, agree: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Update the weights. Returns what `agree` returns of the squared norm."""

    def named_state(self) -> Iterator[tuple[Any, str, torch.Tensor]]:
        """Yield (weight, name, tensor): weights as "model.NAME", and the state."""

    def tensors(self) -> dict[str, torch.Tensor | Box]:
        """The tensors of a checkpoint, by name."""

    def buffers(self) -> Iterator[torch.Tensor]:
        """Memory that it keeps beside weights and state."""

    def is_finite(self) -> bool:
        """Whether all tensors that it would save are finite."""

    def loaded(self) -> None:
        """A checkpoint was loaded into `tensors`."""

    def close(self) -> None:
        """Drop all references to process groups."""


class RunRanks(Protocol):
    """The ranks of the run: see `World` in train/world.py."""

    @property
    def this_rank(self) -> Rank:
        """This process among the ranks."""

    @property
    def store(self) -> Store:
        """Of the run."""

    @property
    def pages(self) -> Pages | None:
        """Of the launcher, if it has started all ranks on one machine."""

    @property
    def timeout(self) -> timedelta:
        """parallel.timeout_s."""

    @property
    def servers(self) -> dist.ProcessGroup | None:
        """Process group of the parameter servers; None: this rank is none, or the only one."""

    @property
    def meeting(self) -> Any:
        """The address of this host on the way to the others, and a key that all know."""

    def sum_over(self, values: torch.Tensor, axis: str) -> torch.Tensor:
        """Sum over the ranks of an axis, in place. Collective."""

    def meets(self, step: int) -> None:
        """This rank is in the collectives after a step; 0: in none."""

    def go_on_with(self, living: Sequence[int], plan: Plan, when: str) -> None:
        """Make the process groups anew, of the ranks that live. Collective of these."""

    def give_up(self, error: BaseException) -> None:
        """An error of a thread ends this rank."""


@dataclass(frozen=True)
class Services:
    """What the run gives a coupling.

    Attributes:
        ranks: of the run.
        this_rank: with its process groups.
        device: of this rank.
        first_step: number of complete steps when the command begins.
        rate_of: learning rate of a step (from 0).
        stop_requested: whether this process was asked to stop.
        own_optimizer: makes an optimizer of this rank's weights.
        server_optimizer: makes one of weights in host memory, which a server updates.
        server_weights: the weights of a server, by its number, with initial values.
        generation: number of the generation that this coupling is of: see train/generation.py.
    """

    ranks: RunRanks
    this_rank: ThisRank
    device: torch.device
    first_step: int
    rate_of: Callable[[int], float]
    stop_requested: Callable[[], bool]
    own_optimizer: Callable[[Sequence[Any]], Any]
    server_optimizer: Callable[[Sequence[Any]], Any]
    server_weights: Callable[[int], Sequence[Any]]
    generation: int = 0

    @property
    def rank(self) -> int:
        """The number of this rank."""
        return self.this_rank.rank

    def key(self, name: str) -> str:
        """A key of the store that is of this generation: addresses of another one are closed."""
        return f"{name} of generation {self.generation}" if self.generation else name
