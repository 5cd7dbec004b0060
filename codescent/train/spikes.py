"""In: loss and gradient norm of each step, as all ranks know them. Out: which steps are spikes, before their update.
Does not act on a spike (skips.py does). Every rank sees the same sums, so all decide alike without a message."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from codescent.config.sections import Survive

USUAL = 1.4826
"""Of normally distributed numbers the standard deviation is so many times the median deviation from the median."""
LEAST = 0.01
"""The usual deviation counts as at least this share of the median: else numbers that hardly vary would have spikes."""


@dataclass(frozen=True)
class Spike:
    """A step whose update was refused, and what it would have had to be below."""

    train_loss: float
    grad_norm: float
    most_loss: float
    most_norm: float

    def __str__(self) -> str:
        said = []
        if self.train_loss > self.most_loss:
            said.append(f"the loss {self.train_loss:.4g} is above {self.most_loss:.4g}")
        if self.grad_norm > self.most_norm:
            said.append(f"the norm of the gradients {self.grad_norm:.4g} is above {self.most_norm:.4g}")
        return " and ".join(said)


class Spikes:
    """Compares each step with the median of the accepted steps before it.

    Args:
        keys: of the run.
        before: `state` of the checkpoint from which the steps go on; empty: none has been kept.

    Attributes:
        looks: whether spikes are looked for.
        losses: returns the number of losses of the present step.
        found: the spike of the last step; None: it was none.
        in_row: spikes in a row, up to the last step.
    """

    losses: Callable[[], int]

    def __init__(self, keys: Survive, before: Mapping[str, Any]) -> None:
        self.keys, self.looks = keys, keys.on_spike != "none"
        self._losses = deque[float](before.get("losses", ()), keys.spike_window)
        self._norms = deque[float](before.get("norms", ()), keys.spike_window)
        self.in_row: int = before.get("in_row", 0)
        self.found: Spike | None = None

    def accepts(self, sums: torch.Tensor) -> bool:
        """Whether the update of a finite step is applied. `sums`: its loss, requests to stop, squared norm."""
        total, *_, square = sums.tolist()
        loss, norm = total / self.losses(), math.sqrt(square)
        self.found = None
        if len(self._losses) == self.keys.spike_window:
            most = [_limit(past, self.keys.spike_factor) for past in (self._losses, self._norms)]
            if loss > most[0] or norm > most[1]:
                self.found = Spike(loss, norm, *most)
                self.in_row += 1
                return False
        self._losses.append(loss)
        self._norms.append(norm)
        self.in_row = 0
        return True

    def state(self) -> dict[str, Any]:
        """What decides later steps, as JSON data of a checkpoint."""
        return {"losses": list(self._losses), "norms": list(self._norms), "in_row": self.in_row} if self.looks else {}


def _limit(past: Sequence[float], factor: float) -> float:
    """The median, and `factor` times the usual deviation from it."""
    median = statistics.median(past)
    deviation = USUAL * statistics.median(abs(value - median) for value in past)
    return median + factor * max(deviation, LEAST * abs(median))
