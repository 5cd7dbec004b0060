"""In: the trained weights of a rank, a decay. Out: their exponential moving average (EMA), of the shards that it holds.
Does not talk to other ranks: each averages what its optimizer updates. It does not change a weight of the training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from codescent.train.optimize import Weight


class Ema:
    """The average of the weights over steps: after a step, average = decay * average + (1 - decay) * weights.

    As torch.optim.swa_utils.get_ema_multi_avg_fn (Polyak and Juditsky 1992 average alike, with equal shares). It begins
    with the initial weights. Averages have the dtype, the shape, the device and the shards of the master copies.

    Args:
        weights: the trained tensors of this rank, with initial values.
        decay: at least 0, less than 1. 0: there is no average, and nothing is done.
        every: steps from one update to the next.
    """

    def __init__(self, weights: Sequence[Weight], decay: float, every: int) -> None:
        self.weights, self.decay, self.every = list(weights) if decay else [], decay, every
        self.masters = [weight.master.detach() for weight in self.weights]
        self.averages = [master.clone() for master in self.masters]

    @property
    def updates(self) -> Sequence[Callable[[int], None]]:
        """What a step calls with its number: `update`, if there is an average."""
        return (self.update,) if self.decay else ()

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Step `step` (from 1) is done; a step that was skipped has left the weights as they were. No device waits."""
        if self.averages and step % self.every == 0:
            torch._foreach_lerp_(self.averages, self.masters, 1 - self.decay)

    def named(self) -> Iterator[tuple[Weight, str, torch.Tensor]]:
        """Yield (weight, name, tensor): each average as "ema.NAME"."""
        for weight, average in zip(self.weights, self.averages, strict=True):
            yield weight, f"ema.{weight.name}", average

    @contextmanager
    def in_place_of_weights(self) -> Iterator[None]:
        """A block in which forward reads the averages. Then the weights are there again, bit by bit."""
        self._put(averages=True)
        try:
            yield
        finally:
            self._put(averages=False)

    @torch.no_grad()
    def _put(self, *, averages: bool) -> None:
        """Exchange weights and averages, one tensor at a time; weights apart from their masters are written anew."""
        for weight, master, average in zip(self.weights, self.masters, self.averages, strict=True):
            if weight.master is not weight.tensor:
                weight.tensor.copy_(average if averages else master)
                continue
            kept = master.clone()
            master.copy_(average)
            average.copy_(kept)
