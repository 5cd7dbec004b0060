"""In: a split of tokens, the length of a sample. Out: samples: tokens, and the next token of each.
Does not order samples (loader.py does)."""

from __future__ import annotations

import numpy as np

from codescent.data.samples import Numbers, Samples
from codescent.data.text.split import Split


class TextSource:
    """A split, cut into consecutive samples of `seq_len` tokens.

    Args:
        split: the tokens.
        seq_len: tokens of a sample that a model reads.
        losses_per_sample: number of losses of a sample: one for each token, or for each of the target stream.
    """

    def __init__(self, split: Split, seq_len: int, losses_per_sample: int) -> None:
        self.name = split.name
        self.num_samples = split.num_samples(seq_len)
        self.losses_per_sample: int | None = losses_per_sample
        self._split, self._seq_len, self._losses = split, seq_len, losses_per_sample

    def read(self, numbers: Numbers) -> Samples:
        """inputs and targets int64 [n, seq_len].

        Raises:
            UserError: a token is outside the vocabulary: file and byte.
            IndexError: a number is outside [0, num_samples).
        """
        rows = self._split.read(numbers, self._seq_len)
        return Samples(np.ascontiguousarray(rows[:, :-1]), np.ascontiguousarray(rows[:, 1:]))

    def losses(self, numbers: Numbers) -> Numbers:
        """`losses_per_sample` for each."""
        return np.full(len(numbers), self._losses, np.int64)
