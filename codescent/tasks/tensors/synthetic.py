"""In: number and sizes of samples, a seed. Out: arrays of random numbers, equal on every machine and in every format.
Does not write files (prepare.py does)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from codescent.base.errors import UserError
from codescent.base.sealed import digest
from codescent.data.prepared import SPLITS

Floats = npt.NDArray[np.float32]

PREFIX = "synthetic:"
VERSION = 1  # increase it when the function that computes the numbers changes
NAMES = ("source", "target")
MAX_SEED = 2**63 - 1
_BLOCK = 256  # samples that are computed together


@dataclass(frozen=True)
class Sizes:
    """A sample: `source_len` vectors of `width` numbers, and `target_len` of them."""

    source_len: int
    target_len: int
    width: int

    def __str__(self) -> str:
        return f"source {self.source_len}x{self.width}, target {self.target_len}x{self.width}"


@dataclass(frozen=True)
class Synthetic:
    """Random numbers instead of data, for benchmarks: uniform in [0, 1), like torch.rand's. A source does not depend on
    its target. Each number is a function of (seed, split, name, position). `train` and `validation` count samples.
    """

    train: int
    validation: int
    sizes: Sizes
    seed: int = 0

    @property
    def fingerprint(self) -> str:
        """A hash that changes with the numbers; equal for all file formats."""
        return digest({"synthetic": VERSION, **asdict(self)})

    def samples(self, split: str) -> int:
        """Number of samples of a split."""
        return self.train if split == "train" else self.validation

    def shape(self, split: str, name: str) -> tuple[int, int, int]:
        """[samples, vectors, numbers of each]."""
        length = self.sizes.source_len if name == "source" else self.sizes.target_len
        return self.samples(split), length, self.sizes.width

    def blocks(self, split: str, name: str) -> Iterator[Floats]:
        """The numbers of a split in the order of its samples, [n, length, width] at a time."""
        samples, length, width = self.shape(split, name)
        for block in range(-(-samples // _BLOCK)):
            count = min(_BLOCK, samples - block * _BLOCK)
            numbers = count * length * width
            key = np.array([self.seed, 2 * SPLITS.index(split) + NAMES.index(name)], np.uint64)
            raw = np.random.Philox(key=key, counter=np.array([0, 0, block, 0], np.uint64)).random_raw(-(-numbers // 2))
            # 24 bits make an fp32 in [0, 1) without rounding.
            halves = raw.astype("<u8", copy=False).view("<u4")[:numbers] >> np.uint32(8)
            yield (halves.astype(np.float32) * np.float32(2**-24)).reshape(count, length, width)

    def whole(self, split: str, name: str) -> Floats:
        """All of a split, in memory."""
        out = np.empty(self.shape(split, name), np.float32)
        first = 0
        for block in self.blocks(split, name):
            out[first : first + len(block)] = block
            first += len(block)
        return out


def parse(corpus: str) -> tuple[int, int]:
    """Samples and seed of a corpus synthetic:SAMPLES or synthetic:SAMPLES:SEED. Raises UserError: another form."""
    words = corpus.removeprefix(PREFIX).split(":")
    numbers = [int(word) if word.isascii() and word.isdecimal() else -1 for word in words]
    if len(numbers) > 2 or min(numbers) < 0 or numbers[0] < 1 or numbers[-1] > MAX_SEED:
        raise UserError(f"{corpus}: must be synthetic:SAMPLES or synthetic:SAMPLES:SEED, such as synthetic:2048:0")
    return numbers[0], numbers[1] if len(numbers) > 1 else 0
