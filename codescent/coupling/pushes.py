"""In: what a worker says of a push. Out: `Push`, and what the pushes of one step say together.
Does not decide whether a push is applied (parameter_server.py does) and holds no weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
    unsound: set[int] = field(default_factory=set)
    """Workers that have pushed what is not finite."""

    def count(self, staleness: int, *, stop: bool) -> None:
        """One more push, whose weights were so many versions old. Its loss is added apart, if it is good."""
        self.pushes += 1
        self.stops += stop
        self.stale += staleness
        self.most_stale = max(self.most_stale, staleness)

    @property
    def sums(self) -> list[float]:
        """[loss, stops, squared norm, skipped updates, mean and largest staleness, losses, culprit, late parts].

        The culprit is 1 more than the rank of the worker that alone has pushed what is not finite; 0: none has, or
        several have, as where a run diverges.

        With several updates in a step the squared norm is their mean.
        """
        culprit = next(iter(self.unsound)) + 1 if len(self.unsound) == 1 else 0
        mean = self.stale / max(1, self.pushes)
        loss = math.nan if self.skips and not self.losses else self.loss
        return [
            loss,
            self.stops,
            self.square,
            self.skips,
            mean,
            self.most_stale,
            max(1, self.losses),
            culprit,
            self.late,
        ]


def is_finite(values: torch.Tensor) -> bool:
    """Whether all elements are finite. A finite sum has finite summands only, and is ten times as fast as a test of
    each."""
    return bool(values.sum().isfinite()) or bool(values.isfinite().all())


def unsound(pushes: Sequence[Push], total: torch.Tensor) -> set[int]:
    """The workers whose loss, norm or gradients are not finite. `total`: see `_not_finite`."""
    return {push.worker for push in pushes if not math.isfinite(push.loss + push.square)} | _not_finite(pushes, total)


def untrue(pushes: Sequence[Push], total: torch.Tensor) -> set[int]:
    """The workers whose gradients are not finite, although they sent a finite norm. `total`: see `_not_finite`.

    Finite gradients may have an infinite sum. No element of a sum is larger than the sum of the norms.
    """
    bound = sum(math.sqrt(push.square) for push in pushes)
    first = set() if len(pushes) == 1 or bound < torch.finfo(total.dtype).max else {pushes[0].worker}
    return {push.worker for push in pushes if math.isfinite(push.square)} & _not_finite(pushes, total) - first


def _not_finite(pushes: Sequence[Push], total: torch.Tensor) -> set[int]:
    """The workers whose gradients are not finite.

    `total`: the sum of the gradients, which lies in the memory of the first push: what is not finite there, and in no
    other push, is of the first one.
    """
    found = set()
    first, *others = pushes
    explained = torch.zeros_like(total, dtype=torch.bool)
    for push in others:
        wrong = ~push.gradients.isfinite()
        explained |= wrong
        if bool(wrong.any()):
            found.add(push.worker)
    if bool((~total.isfinite() & ~explained).any()):
        found.add(first.worker)
    return found
