"""In: what a worker says of a push. Out: `Push`, and what the pushes of one step say together.
Does not decide whether a push is applied (serve.py does) and holds no weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from codescent.servers import Portion


@dataclass(frozen=True)
class Push:
    """What a worker has sent: its part of the gradients, of which portion, and with which weights."""

    worker: int
    number: int
    ticket: int
    portion: Portion
    gradients: torch.Tensor
    loss: float
    losses: int
    square: float
    stop: bool
    facts: Mapping[str, Any]
    first: int = 0  # in rounds: the first of its steps, counted from that of the portion
    is_last: bool = True  # with it the portion is done


@dataclass
class Step:
    """What the pushes of one step say, summed: `sums` is what all ranks are told."""

    loss: float = 0.0
    losses: int = 0
    stops: int = 0
    square: float = 0.0
    skips: int = 0
    stale: int = 0
    most_stale: int = 0
    pushes: int = 0
    late: int = 0

    @property
    def sums(self) -> list[float]:
        """[loss, stops, squared norm, skipped updates, mean and largest staleness, losses, parts that came late].

        With several updates in a step the squared norm is their mean.
        """
        mean = self.stale / max(1, self.pushes)
        loss = math.nan if self.skips and not self.losses else self.loss
        return [loss, self.stops, self.square, self.skips, mean, self.most_stale, max(1, self.losses), self.late]
