"""In: the token shards of a split. Out: samples by number: `seq_len` tokens as inputs, their next tokens as targets.
Does not decide the order of the samples (loader.py does)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from codescent.base.errors import UserError
from codescent.data.file_array import FileArray, Watched
from codescent.data.samples import Numbers, Samples, in_range
from codescent.data.text.foreign import ShardFile

SCAN_TOKENS = 1 << 22


class Split:
    """The tokens of one split: its shards in order, and samples by number."""

    def __init__(self, name: str, files: tuple[ShardFile, ...], vocab_size: int) -> None:
        self.name = name
        self.files = tuple(file for file in files if file.num_tokens)
        self.vocab_size = vocab_size
        counts = [file.num_tokens for file in self.files]
        self._starts = np.array([0, *counts], np.int64).cumsum()
        self._shards = [
            FileArray(Watched(file.path, file.sha256), file.dtype, file.offset_bytes, file.num_tokens)
            for file in self.files
        ]

    @property
    def num_tokens(self) -> int:
        """Tokens of the split."""
        return int(self._starts[-1])

    def num_samples(self, seq_len: int) -> int:
        """Number of whole samples of `seq_len` inputs and `seq_len` targets (the inputs, shifted by one)."""
        return max(0, (self.num_tokens - 1) // seq_len)

    def read(self, samples: npt.NDArray[np.integer[Any]], seq_len: int) -> Numbers:
        """Tokens of samples, int64 [n, seq_len + 1]: sample j is tokens [j * seq_len, j * seq_len + seq_len].

        Raises:
            UserError: a token is outside the vocabulary (the message has file and byte), or a shard has changed.
            IndexError: there is no such sample.
        """
        numbers = in_range(samples, self.num_samples(seq_len), self.name)
        firsts = numbers * seq_len
        shards = np.searchsorted(self._starts, firsts, "right") - 1
        inside = firsts + seq_len < self._starts[shards + 1]
        out = np.empty((len(numbers), seq_len + 1), np.int64)
        for shard in np.unique(shards[inside]).tolist():
            rows = inside & (shards == shard)
            out[rows] = self._shards[shard].windows(firsts[rows] - self._starts[shard], seq_len + 1)
        for row in np.flatnonzero(~inside).tolist():
            out[row] = self.span(int(firsts[row]), seq_len + 1)
        if out.max(initial=0) >= self.vocab_size:
            row, column = (int(place) for place in np.argwhere(out >= self.vocab_size)[0])
            raise UserError(self._outside(int(firsts[row]) + column, int(out[row, column])))
        return out

    def where(self, chosen: npt.NDArray[np.bool_]) -> Numbers:
        """Positions of all tokens whose id is in `chosen` (a mask over ids), in order; raises as `read`."""
        found = [np.empty(0, np.int64)]
        for start, tokens in self._pieces():
            if problem := self._problem(start, tokens):
                raise UserError(problem)
            found.append(start + np.flatnonzero(chosen[tokens]))
        return np.concatenate(found)

    def span(self, first: int, count: int) -> Numbers:
        """Tokens [first, first + count), across shards: int64 [count]."""
        out = np.empty(count, np.int64)
        done = 0
        while done < count:
            shard = int(np.searchsorted(self._starts, first + done, "right")) - 1
            begin = first + done - int(self._starts[shard])
            part = self._shards[shard][begin : begin + count - done]
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
        for start, tokens in zip(self._starts.tolist(), self._shards):
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


class TextSource:
    """A split, cut into samples of `seq_len` tokens, with the next token of each as its target; see `Source`."""

    def __init__(self, split: Split, seq_len: int, losses_per_sample: int) -> None:
        self.name = split.name
        self.num_samples = split.num_samples(seq_len)
        self.losses_per_sample: int | None = losses_per_sample
        self._split, self._seq_len, self._losses = split, seq_len, losses_per_sample

    def read(self, numbers: Numbers) -> Samples:
        """inputs and targets int64 [n, seq_len]; raises as `Split.read`."""
        rows = self._split.read(numbers, self._seq_len)
        return Samples(np.ascontiguousarray(rows[:, :-1]), np.ascontiguousarray(rows[:, 1:]))

    def losses(self, numbers: Numbers) -> Numbers:
        """`losses_per_sample` for each."""
        return np.full(len(numbers), self._losses, np.int64)
