"""In: the trained weights of a rank before its first step. Out: a copy, which takes their place for a while.
Does not compute with them. With adapters they are few: frozen weights are the same in both models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from codescent.train.optimize import Weight


class InitialWeights:
    """The values that weights have now, in the dtype and the shards that forward reads.

    Args:
        weights: the trained tensors of this rank.
    """

    def __init__(self, weights: Sequence[Weight]) -> None:
        self._places = [weight.tensor.detach() for weight in weights]
        self._initial = [place.clone() for place in self._places]

    @contextmanager
    def in_place_of_weights(self) -> Iterator[None]:
        """A block in which forward reads the copy. Then the weights are there again, bit by bit."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for place, initial in zip(self._places, self._initial, strict=True):
            kept = place.clone()
            place.copy_(initial)
            initial.copy_(kept)
