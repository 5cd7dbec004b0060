"""In: the samples of a run, their order. Out: which share of a step's positions is padding, which is computed in vain.
Does not read samples: their sources know it by number."""

from __future__ import annotations

from codescent.data.mixture import order_of
from codescent.data.samples import PaddedSource


class Padding:
    """The padding of each step of a run, over all ranks. `batch`: samples of a step. `positions`: of a sample."""

    def __init__(self, source: PaddedSource, seed: int, batch: int, positions: int) -> None:
        self._source = source
        self._order, self._positions = order_of(source, seed, batch), positions

    def share(self, step: int) -> float:
        """Share of the positions of step `step` (from 0) that are padding, in [0, 1)."""
        samples = self._order.global_batch_size
        numbers = self._order.indices_of_steps(step, 1, 0, samples).ravel()
        return float(self._source.padding(numbers).sum() / (samples * self._positions))
