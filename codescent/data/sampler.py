"""In: seed, number of samples, global batch size. Out: which sample stands at which position of which step.
Does not know ranks, workers or files: a pure function, so every layout sees the same samples in the same order."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from codescent.errors import UserError

NUM_ROUNDS = 10
Numbers = npt.NDArray[np.uint64]


class Sampler:
    """The order of the samples. An epoch is a permutation of them without replacement, cut into whole steps.

    Position i of step s is sample P(s mod E * B + i), where B is the global batch size, E = num_samples // B the steps
    of an epoch, and P the permutation of epoch s // E. The num_samples mod B last samples of a permutation are left out
    of its epoch (others in each), so that a step never spans two permutations and never holds a sample twice.

    Args:
        seed: any whole number.
        num_samples: samples of the split.
        global_batch_size: samples of a step, over all ranks.
        source: what to call the split in an error.

    Raises:
        UserError: fewer samples than one step needs.
    """

    def __init__(self, seed: int, num_samples: int, global_batch_size: int, source: str = "the corpus") -> None:
        if num_samples < 1:
            raise UserError(
                f"{source} is shorter than one sample (data.seq_len + 1 tokens): shorten it or give a longer corpus"
            )
        if num_samples < global_batch_size:
            raise UserError(
                f"{source} has {num_samples} samples of data.seq_len tokens, fewer than one step of "
                f"train.global_batch_size = {global_batch_size}: lower one of the two or give more text"
            )
        self.seed = seed
        self.num_samples = num_samples
        self.global_batch_size = global_batch_size
        self.steps_per_epoch = num_samples // global_batch_size

    def indices(self, step: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Sample numbers at positions [start, stop) of a step.

        Args:
            step: from 0.
            start, stop: 0 <= start <= stop <= global_batch_size.

        Returns:
            int64 [stop - start], each in [0, num_samples).
        """
        if step < 0 or not 0 <= start <= stop <= self.global_batch_size:
            raise IndexError(f"step {step}, positions [{start}, {stop}) of {self.global_batch_size}")
        epoch, step_of_epoch = divmod(step, self.steps_per_epoch)
        first = step_of_epoch * self.global_batch_size
        places = np.arange(first + start, first + stop, dtype=np.uint64)
        return permute(places, self.num_samples, _round_keys(self.seed, epoch)).astype(np.int64)


def permute(places: Numbers, count: int, keys: Numbers) -> Numbers:
    """A pseudo-random permutation of [0, count), at some places, without a table.

    A Feistel network over the least power of two that holds `count` (its two halves may differ by a bit), and cycle
    walking: what falls outside goes through the network again until it falls inside (Black and Rogaway, "Ciphers with
    arbitrary finite domains", 2002). Less than two walks on average.

    Args:
        places: uint64, each < count.
        keys: uint64 [NUM_ROUNDS].
    """
    bits = max(2, (count - 1).bit_length())
    out = _feistel(places, bits, keys)
    while (outside := np.flatnonzero(out >= count)).size:
        out[outside] = _feistel(out[outside], bits, keys)
    return out


def _feistel(places: Numbers, bits: int, keys: Numbers) -> Numbers:
    low_bits = np.uint64(bits // 2)
    low_mask = np.uint64((1 << (bits // 2)) - 1)
    high_mask = np.uint64((1 << (bits - bits // 2)) - 1)
    low, high = places & low_mask, places >> low_bits
    for turn in range(0, NUM_ROUNDS, 2):
        low = low ^ (_mixed(high, keys[turn]) & low_mask)
        high = high ^ (_mixed(low, keys[turn + 1]) & high_mask)
    return (high << low_bits) | low


def _mixed(values: Numbers, key: np.uint64) -> Numbers:
    """A hash of each value under a key: the finaliser of SplitMix64 (Steele, Lea and Flood, 2014), upper half."""
    mixed = values ^ key
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed >> np.uint64(32)


@lru_cache(maxsize=8)
def _round_keys(seed: int, epoch: int) -> npt.NDArray[Any]:
    """The keys of one epoch's permutation: BLAKE2b of (seed, epoch, round)."""
    digests = (hashlib.blake2b(f"{seed} {epoch} {turn}".encode(), digest_size=8).digest() for turn in range(NUM_ROUNDS))
    return np.frombuffer(b"".join(digests), "<u8").astype(np.uint64)
