"""In: the token shards of a split. Out: samples of its tokens, memory-mapped, by number.
Does not order the samples (loader.py does) and does not know the task."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from codescent.base.errors import UserError
from codescent.data.samples import in_range
from codescent.data.text.foreign import ShardFile

SCAN_TOKENS = 1 << 22

Rows = npt.NDArray[np.int64]


class Split:
    """The tokens of one split: its shards in order, and samples by number."""

    def __init__(self, name: str, files: tuple[ShardFile, ...], vocab_size: int) -> None:
        self.name = name
        self.files = tuple(file for file in files if file.num_tokens)
        self.vocab_size = vocab_size
        counts = [file.num_tokens for file in self.files]
        self._starts = np.array([0, *counts], np.int64).cumsum()
        self._maps: list[npt.NDArray[Any]] = [
            np.asarray(np.memmap(file.path, file.dtype, "r", file.offset_bytes, (file.num_tokens,)))
            for file in self.files
        ]

    @property
    def num_tokens(self) -> int:
        """Tokens of the split."""
        return int(self._starts[-1])

    def num_samples(self, seq_len: int) -> int:
        """Number of whole samples of `seq_len` inputs and `seq_len` targets (the inputs, shifted by one)."""
        return max(0, (self.num_tokens - 1) // seq_len)

    def read(self, samples: npt.NDArray[np.integer[Any]], seq_len: int) -> Rows:
        """Tokens of samples: sample j is tokens [j * seq_len, j * seq_len + seq_len], both ends included.

        Args:
            samples: [n], each in [0, num_samples(seq_len)).

        Returns:
            int64 [n, seq_len + 1].

        Raises:
            UserError: a token is outside the vocabulary: file and byte.
            IndexError: a number is outside the range.
        """
        numbers = in_range(samples, self.num_samples(seq_len), self.name)
        firsts = numbers * seq_len
        shards = np.searchsorted(self._starts, firsts, "right") - 1
        inside = firsts + seq_len < self._starts[shards + 1]
        out = np.empty((len(numbers), seq_len + 1), np.int64)
        for shard in np.unique(shards[inside]).tolist():
            rows = inside & (shards == shard)
            windows = np.lib.stride_tricks.sliding_window_view(self._maps[shard], seq_len + 1)
            out[rows] = windows[firsts[rows] - self._starts[shard]]
        for row in np.flatnonzero(~inside).tolist():
            out[row] = self.span(int(firsts[row]), seq_len + 1)
        if out.max(initial=0) >= self.vocab_size:
            row, column = (int(place) for place in np.argwhere(out >= self.vocab_size)[0])
            raise UserError(self._outside(int(firsts[row]) + column, int(out[row, column])))
        return out

    def where(self, chosen: npt.NDArray[np.bool_]) -> Rows:
        """Positions of all tokens whose id is in `chosen` (a mask over ids), in order; reads the whole split.

        Raises:
            UserError: a token is outside the vocabulary: file and byte.
        """
        found = [np.empty(0, np.int64)]
        for start, tokens in self._pieces():
            if problem := self._problem(start, tokens):
                raise UserError(problem)
            found.append(start + np.flatnonzero(chosen[tokens]))
        return np.concatenate(found)

    def span(self, first: int, count: int) -> Rows:
        """Tokens [first, first + count), across shards: int64 [count]."""
        out = np.empty(count, np.int64)
        done = 0
        while done < count:
            shard = int(np.searchsorted(self._starts, first + done, "right")) - 1
            begin = first + done - int(self._starts[shard])
            part = self._maps[shard][begin : begin + count - done]
            out[done : done + len(part)] = part
            done += len(part)
        return out

    def problem(self) -> str | None:
        """A message about the first token outside the vocabulary, or None; reads the whole split."""
        return next(filter(None, (self._problem(start, tokens) for start, tokens in self._pieces())), None)

    def largest(self) -> int:
        """The largest token; reads the whole split."""
        return max((int(tokens.max()) for _, tokens in self._pieces()), default=-1)

    def _pieces(self) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        for start, tokens in zip(self._starts.tolist(), self._maps):
            for first in range(0, len(tokens), SCAN_TOKENS):
                yield start + first, tokens[first : first + SCAN_TOKENS]

    def _problem(self, start: int, tokens: npt.NDArray[Any]) -> str | None:
        if int(tokens.max(initial=0)) < self.vocab_size:
            return None
        place = int(np.argmax(tokens >= self.vocab_size))
        return self._outside(start + place, int(tokens[place]))

    def _outside(self, position: int, token: int) -> str:
        shard = int(np.searchsorted(self._starts, position, "right")) - 1
        file = self.files[shard]
        offset_bytes = file.offset_bytes + (position - int(self._starts[shard])) * file.dtype.itemsize
        return f"{file.path}: token {token} at byte {offset_bytes} is outside the vocabulary of {self.vocab_size}"
