"""In: where the documents of samples end. Out: the extras by which a model keeps them apart; samples of a text whose
documents are separate.
Does not decide which token ends a document (tasks do), and computes no attention."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from codescent.data.samples import NO_TARGET, Numbers, Samples
from codescent.data.text.split import Split

# Shapes: n samples, T positions of a sample, M documents of the sample that has most, rounded up.
ROUNDED = 8
"""M is a multiple of it. So few shapes occur, and blocks that torch.compile compiles are rarely compiled again."""
COUNTED_AT_ONCE = 1 << 20
"""Tokens in memory while targets are counted: a validation split may have many."""


def extras_of(is_last_nT: npt.NDArray[np.bool_]) -> dict[str, Numbers]:
    """The extras of samples with several documents, from which positions are the last ones of a document.

    A sample ends its last document, whether or not that goes on in the corpus.

    Returns: `begins_BT`, int64 [n, T]: the position at which the document of each position begins; `ends_BM`, int64
    [n, M]: the positions behind each document, and T where a sample has fewer than M.
    """
    samples, length = is_last_nT.shape
    begins = np.zeros((samples, length), np.int64)
    begins[:, 1:] = np.where(is_last_nT[:, :-1], np.arange(1, length), 0)
    rows, columns = np.nonzero(is_last_nT)
    counts = np.bincount(rows, minlength=samples)
    most = max(1, int(counts.max(initial=0)) + 1)
    ends = np.full((samples, -(-most // ROUNDED) * ROUNDED), length, np.int64)
    ends[rows, np.arange(len(rows)) - (np.cumsum(counts) - counts)[rows]] = columns + 1
    return {"begins_BT": np.maximum.accumulate(begins, 1), "ends_BM": ends}


def separate_samples(inputs: Numbers, targets: Numbers, end: int) -> Samples:
    """Samples int64 [n, T] of a text. The token `end` is the last one of its document, and has no target."""
    is_last = inputs == end
    return Samples(inputs, np.where(is_last, NO_TARGET, targets), extras_of(is_last))


class SeparateSource:
    """A split cut into samples of `seq_len` tokens, in which each document is by itself; see `Source`.

    Samples are those of `TextSource`. The token `end` is the last one of its document. It has no target, because the
    next token belongs to another document: every token but the first one of a document (or of a sample) is a target.
    """

    losses_per_sample: int | None = None

    def __init__(self, split: Split, seq_len: int, end: int) -> None:
        self.name = split.name
        self.num_samples = split.num_samples(seq_len)
        self._split, self._seq_len, self._end = split, seq_len, end

    def read(self, numbers: Numbers) -> Samples:
        """inputs and targets int64 [n, seq_len], and the extras of `extras_of`; raises as `Split.read`."""
        rows = self._split.read(numbers, self._seq_len)
        return separate_samples(np.ascontiguousarray(rows[:, :-1]), rows[:, 1:], self._end)

    def losses(self, numbers: Numbers) -> Numbers:
        """Number of targets of each sample: the tokens are read, as no file says where documents end."""
        found, at_once = [np.empty(0, np.int64)], max(1, COUNTED_AT_ONCE // self._seq_len)
        for first in range(0, len(numbers), at_once):
            rows = self._split.read(numbers[first : first + at_once], self._seq_len)
            found.append((rows[:, :-1] != self._end).sum(1))
        return np.concatenate(found)
