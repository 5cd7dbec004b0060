"""In: a seed, the number of samples, the global batch size. Out: which samples a step takes, at which positions.
Does not read samples (loader.py does). Stores no order: it is computed from the seed and the step number."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from codescent.base.errors import UserError

NUM_ROUNDS = 10
Places = npt.NDArray[np.uint64]


class StepOrder(Protocol):
    """Which samples a step takes: a function of the step's number, and of nothing else."""

    global_batch_size: int

    def indices_of_steps(self, first: int, count: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Sample numbers of `count` steps from `first` on, at positions [start, stop): int64 [count, stop - start]."""


class Sampler:
    """The order of the samples. An epoch is a permutation of them without replacement, cut into whole steps.

    Position i of step s is sample P(s mod E * B + i). B is the global batch size over all ranks, E = num_samples // B
    the number of steps of an epoch, P the permutation of epoch s // E. Each epoch skips the last num_samples mod B
    samples of its permutation, so that a step never spans two permutations and never contains a sample twice.

    Raises UserError: the split has fewer samples than one step needs.
    """

    def __init__(self, seed: int, num_samples: int, global_batch_size: int) -> None:
        if num_samples < 1:
            raise UserError(
                "the corpus is shorter than one sample (data.seq_len + 1 tokens): lower data.seq_len or give more text"
            )
        if num_samples < global_batch_size:
            raise UserError(
                f"the corpus has {num_samples} samples of data.seq_len tokens, fewer than one step of "
                f"train.global_batch_size = {global_batch_size}: lower one of the two or give more text"
            )
        self.seed, self.num_samples, self.global_batch_size = seed, num_samples, global_batch_size
        self.steps_per_epoch = num_samples // global_batch_size

    def indices_of_steps(self, first: int, count: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Sample numbers of `count` steps from `first` on, at positions [start, stop): int64 [count, stop - start]."""
        if first < 0 or not 0 <= start <= stop <= self.global_batch_size:
            raise IndexError(f"step {first}, positions [{start}, {stop}) of {self.global_batch_size}")
        rows: list[npt.NDArray[np.int64]] = []
        step = first
        while step < first + count:
            epoch, step_of_epoch = divmod(step, self.steps_per_epoch)
            steps = min(first + count - step, self.steps_per_epoch - step_of_epoch)
            firsts = np.arange(step_of_epoch, step_of_epoch + steps)[:, None] * self.global_batch_size
            places = (firsts + np.arange(start, stop)).ravel().astype(np.uint64)
            numbers = permute(places, self.num_samples, round_keys(self.seed, epoch))
            rows.append(numbers.astype(np.int64).reshape(steps, stop - start))
            step += steps
        return np.concatenate(rows)


Ahead = Sequence[tuple[int, int]]
"""Pairs (step, number), ascending: after so many steps, steps take batches that come so many later in the order."""


def batch_of(step: int, ahead: Ahead) -> int:
    """The number in the order (from 0) of the batch of step `step` (from 0)."""
    return step + next((number for after, number in reversed(ahead) if after <= step), 0)


class AheadOrder:
    """Another order, in which some batches are left out."""

    def __init__(self, order: StepOrder, ahead: Ahead) -> None:
        self._order, self._ahead, self.global_batch_size = order, ahead, order.global_batch_size

    def indices_of_steps(self, first: int, count: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        """See `StepOrder`."""
        batches = [batch_of(step, self._ahead) for step in range(first, first + count)]
        return np.concatenate([self._order.indices_of_steps(batch, 1, start, stop) for batch in batches])


class RepeatedOrder:
    """Another order, each of whose batches is taken by several steps, one after the other."""

    def __init__(self, order: StepOrder, times: int) -> None:
        self._order, self._times, self.global_batch_size = order, times, order.global_batch_size

    def indices_of_steps(self, first: int, count: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        """See `StepOrder`."""
        batches = [step // self._times for step in range(first, first + count)]
        return np.concatenate([self._order.indices_of_steps(batch, 1, start, stop) for batch in batches])


def permute(places: Places, count: int, keys: Places) -> Places:
    """A pseudo-random permutation of [0, count), evaluated at `places` (each < count), without a table.

    A Feistel network permutes the smallest power of two >= `count` (its halves may differ by a bit). Results outside
    [0, count) go through the network again: cycle walking (Black and Rogaway, "Ciphers with arbitrary finite domains",
    2002). On average there are less than two passes. `keys` has NUM_ROUNDS numbers.
    """
    bits = max(2, (count - 1).bit_length())
    out = _feistel(places, bits, keys)
    while (outside := np.flatnonzero(out >= count)).size:
        out[outside] = _feistel(out[outside], bits, keys)
    return out


def _feistel(places: Places, bits: int, keys: Places) -> Places:
    low_bits = np.uint64(bits // 2)
    low_mask = np.uint64((1 << (bits // 2)) - 1)
    high_mask = np.uint64((1 << (bits - bits // 2)) - 1)
    low, high = places & low_mask, places >> low_bits
    for turn in range(0, NUM_ROUNDS, 2):
        low = low ^ (_mixed(high, keys[turn]) & low_mask)
        high = high ^ (_mixed(low, keys[turn + 1]) & high_mask)
    return (high << low_bits) | low


def _mixed(values: Places, key: np.uint64) -> Places:
    """Hash each value with a key: upper half of SplitMix64's finaliser (Steele, Lea and Flood, 2014)."""
    mixed = values ^ key
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed >> np.uint64(32)


@lru_cache(maxsize=64)
def round_keys(*what: int | str) -> npt.NDArray[Any]:
    """The round keys of a permutation: BLAKE2b of what it belongs to, such as (seed, epoch), and of the round."""
    texts = (" ".join(map(str, (*what, turn))) for turn in range(NUM_ROUNDS))
    digests = (hashlib.blake2b(text.encode(), digest_size=8).digest() for text in texts)
    return np.frombuffer(b"".join(digests), "<u8").astype(np.uint64)
