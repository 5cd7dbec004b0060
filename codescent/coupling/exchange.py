"""In: nothing. Out: `WeightExchange`, the interface of what replicas that train apart send each other.
Does not contain an exchange: averaging.py, mixing.py and pair_exchange.py do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch


class WeightExchange(Protocol):
    """What replicas that train apart send each other between steps."""

    def stepped(self, number: int, own_losses: int, losses: int) -> None:
        """Step `number` (from 0) is done: the losses of this replica, and of all replicas."""

    def sum_gradients(self, gradients: Sequence[torch.Tensor]) -> None:
        """REDUCE over the replicas, in place."""

    def average(self, fragment: int) -> None:
        """The AVERAGE verb."""

    def merge(self, fragment: int) -> None:
        """The MERGE verb."""

    def distance(self) -> torch.Tensor:
        """[squared distance of this replica from the mean of the replicas, squared norm of this mean]: what this rank
        counts of the round; fp64, [2]."""

    def means(self) -> Sequence[torch.Tensor] | None:
        """The mean over replicas of each trained tensor; None: all replicas have it already. Collective."""

    def state(self) -> Mapping[str, torch.Tensor]:
        """What it keeps between steps, by the names of `Plan.kept`."""

    def buffers(self) -> Iterator[torch.Tensor]:
        """Memory that it holds beside its state, to count it."""

    def close(self) -> None:
        """Drop all references to process groups."""
