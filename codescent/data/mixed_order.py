"""In: a seed, the sizes and weights of corpora, the global batch size. Out: which samples of which corpus a step takes.
Does not read samples (mixture.py does). Stores no order and no counts: both are computed from the step's number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from codescent.data.order import permute, round_keys

BITS = 32
"""Numbers of the sequence that rounds the counts. It begins again after 2**BITS steps."""
Numbers = npt.NDArray[np.int64]


class MixedOrder:
    """The order of samples out of several corpora.

    In every step the number of samples of a corpus is its share of the global batch, rounded up or down, so that the
    numbers add up to the batch. Which way they are rounded follows from the step's number by a sequence of low
    discrepancy (`below`): so after any number of steps the sum is the share of all samples, within a few samples.

    A corpus has epochs of its own. Its samples are numbered through all steps: sample r is P(r mod n) for its n
    samples, with the permutation P of its epoch r // n. So each sample is read once in an epoch. In a step in which an
    epoch ends there are samples of both. Positions of a step are permuted, so that each rank has all corpora.

    Args:
        names: of the corpora; they decide the permutations, and must differ.
        sizes: number of samples of each corpus, at least 1. Samples are numbered from corpus to corpus.
        shares: of each corpus; they sum to 1.
    """

    def __init__(
        self, seed: int, names: Sequence[str], sizes: Sequence[int], shares: Sequence[Fraction], global_batch_size: int
    ) -> None:
        self.seed, self.names, self.global_batch_size = seed, tuple(names), global_batch_size
        self.sizes = tuple(sizes)
        self._offsets = [0, *accumulate(sizes)]
        borders = [share * global_batch_size for share in accumulate(shares)]
        self._whole = [math.floor(border) for border in borders]
        self._parts = [math.ceil((border % 1) * 2**BITS) for border in borders]

    def taken(self, steps: int) -> list[int]:
        """How many samples of each corpus the first `steps` steps take."""
        ends = [steps * whole + below(steps, part) for whole, part in zip(self._whole, self._parts)]
        return [end - begin for begin, end in zip([0, *ends], ends)]

    def of_step(self, step: int) -> list[int]:
        """How many samples of each corpus a step takes, numbered from 0."""
        return [after - before for before, after in zip(self.taken(step), self.taken(step + 1))]

    def indices_of_steps(self, first: int, count: int, start: int, stop: int) -> Numbers:
        """See `StepOrder`. A sample has the number in its corpus, behind all samples of the corpora before."""
        if first < 0 or not 0 <= start <= stop <= self.global_batch_size:
            raise IndexError(f"step {first}, positions [{start}, {stop}) of {self.global_batch_size}")
        corpora, numbers = np.empty((count, stop - start), np.int64), np.empty((count, stop - start), np.int64)
        positions = np.arange(start, stop).astype(np.uint64)
        before = self.taken(first)
        for row, step in enumerate(range(first, first + count)):
            after = self.taken(step + 1)
            begins = np.array([0, *accumulate(new - old for old, new in zip(before, after))])
            keys = round_keys(self.seed, "positions", step)
            slots = permute(positions, self.global_batch_size, keys).astype(np.int64)
            corpora[row] = np.searchsorted(begins[1:], slots, side="right")
            numbers[row] = np.array(before)[corpora[row]] + slots - begins[corpora[row]]
            before = after
        return self._samples(corpora, numbers)

    def _samples(self, corpora: Numbers, numbers: Numbers) -> Numbers:
        """Sample numbers of the mixture, for running numbers of corpora, of equal shape."""
        out = np.empty_like(numbers)
        for corpus in np.unique(corpora).tolist():
            here, size = corpora == corpus, self.sizes[corpus]
            epochs = numbers // size
            for epoch in np.unique(epochs[here]).tolist():
                where = here & (epochs == epoch)
                places = (numbers[where] % size).astype(np.uint64)
                keys = round_keys(self.seed, self.names[corpus], epoch)
                out[where] = self._offsets[corpus] + permute(places, size, keys).astype(np.int64)
        return out


def below(steps: int, threshold: int) -> int:
    """How many of the first `steps` numbers of a sequence are below `threshold`, which is at most 2**BITS.

    Number t of the sequence is t with its BITS bits in reverse order (van der Corput, "Verteilungsfunktionen", 1935).
    Its first n numbers are spread so evenly over [0, 2**BITS) that each interval has its share of them, up to about
    log2(n) / 3 + 1. The numbers t with equal upper bits are a grid, so they are counted without being looked at.
    """
    rounds, steps = divmod(steps, 1 << BITS)
    total = rounds * threshold
    for bit in range(steps.bit_length()):
        if steps >> bit & 1:
            first, width = _reversed(steps >> (bit + 1) << (bit + 1)), BITS - bit
            total += (threshold - first + (1 << width) - 1) >> width
    return total


def _reversed(number: int) -> int:
    """A number with its BITS bits in reverse order."""
    return int(f"{number:0{BITS}b}"[::-1], 2)
