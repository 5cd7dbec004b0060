"""In: a split of tokens, the length of a sample. Out: its samples: tokens, and the token that follows each.
Does not order them (loader.py does)."""

from __future__ import annotations

import numpy as np

from codescent.data.samples import Numbers, Samples
from codescent.data.text.split import Split


class TextSource:
    """A split cut into samples of `seq_len` tokens, one after the other.

    Args:
        split: the tokens.
        seq_len: tokens that a model reads of a sample.
        losses_per_sample: of how many of them it gives a loss: all, or those of the target stream.
    """

    def __init__(self, split: Split, seq_len: int, losses_per_sample: int) -> None:
        self.name = split.name
        self.num_samples = split.num_samples(seq_len)
        self.losses_per_sample: int | None = losses_per_sample
        self._split, self._seq_len, self._losses = split, seq_len, losses_per_sample

    def read(self, numbers: Numbers) -> Samples:
        """inputs and targets int64 [n, seq_len].

        Raises:
            UserError: a token outside the vocabulary: which file, at which byte.
            IndexError: no such sample.
        """
        rows = self._split.read(numbers, self._seq_len)
        return Samples(np.ascontiguousarray(rows[:, :-1]), np.ascontiguousarray(rows[:, 1:]))

    def losses(self, numbers: Numbers) -> Numbers:
        """The same for each."""
        return np.full(len(numbers), self._losses, np.int64)
