"""In: the mean changes of rounds, as they arrive. Out: the weights of a server, moved by an outer optimizer.
Does not receive anything (round_server.py does). outer.py is the outer optimizer of replicas without a server."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Delayed:
    """An outer optimizer whose momentum changes after each `every` changes, by their mean.

    Liu et al. 2024, "Asynchronous local-SGD training for language modeling" (arXiv 2401.09135), algorithm 3 with
    c = 0. With N = `every`, momentum b, rate e and change g (weights before minus after the round):

        each time           D += g;  x -= e g / N
        each Nth time also  m = b m + D / N;  x -= e b m;  D = 0

    "sgd" subtracts e b (the old m) there instead. So N changes computed with the same weights act as their mean does
    in SGD or Nesterov's method. With N = 1 it is that method. "none" is SGD at rate 1 without a momentum.

    Args:
        weights: changed in place.
        kind: "none", "sgd" or "nesterov".
        learning_rate, momentum: of "sgd" and "nesterov".
        every: N.
    """

    def __init__(self, weights: Sequence[Tensor], kind: str, learning_rate: float, momentum: float, every: int) -> None:
        self.rate, self.decay = (1.0, 0.0) if kind == "none" else (learning_rate, momentum)
        self.weights, self.every, self.looks_ahead = list(weights), every, kind == "nesterov"
        self.momentum = [torch.zeros_like(weight) for weight in self.weights] if self.decay else []
        self.sums = [torch.zeros_like(weight) for weight in self.weights] if self.decay and every > 1 else []
        self.count = torch.zeros(1 if self.sums else 0, dtype=torch.float64)  # changes in `sums`

    @torch.no_grad()
    def step(self, changes: Sequence[Tensor]) -> None:
        """Move the weights by a change of each."""
        torch._foreach_add_(self.weights, list(changes), alpha=-self.rate / self.every)
        if not self.decay:
            return
        if not self.sums:
            self._update(changes)
            return
        torch._foreach_add_(self.sums, list(changes))
        self.count += 1
        if int(self.count) >= self.every:
            self._update(torch._foreach_div(self.sums, float(self.every)))
            torch._foreach_zero_(self.sums)
            self.count.zero_()

    def _update(self, means: Sequence[Tensor]) -> None:
        if not self.looks_ahead:
            torch._foreach_add_(self.weights, self.momentum, alpha=-self.rate * self.decay)
        torch._foreach_mul_(self.momentum, self.decay)
        torch._foreach_add_(self.momentum, list(means))
        if self.looks_ahead:
            torch._foreach_add_(self.weights, self.momentum, alpha=-self.rate * self.decay)
