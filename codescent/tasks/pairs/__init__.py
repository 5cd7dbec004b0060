"""In: the tokens of a text. Out: the task "seq2seq": each line is a sample, and its reverse, or its copy, is wanted.
Does not order samples (data/loader.py does) and does not tokenise."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from codescent.base.errors import UserError
from codescent.base.sealed import digest
from codescent.data.samples import Numbers, Samples, in_range
from codescent.data.text.dataset import open_dataset
from codescent.data.text.split import Split
from codescent.data.tokenizers.tokenizer import CharTokenizer, Tokenizer
from codescent.tasks.task import ScoreRequest, Task, TaskRequest
from codescent.tasks.text import TextDataset, TextTask

MARKS = 2
"""Tokens behind the tokenizer's: the first, vocab_size - 2, begins a target; the second ends it."""

VERSION = 2  # of the function from a line to a sample; count on when it changes
NOTHING = -1  # where nothing is wanted


class LineSource:
    """The lines of a split that are not empty, in order, each cut to what fits into source and target.

    A sample's source is the line and padding. The decoder reads `begin`, the line's tokens in the wanted order, and
    padding. Its targets are these tokens and `end`; padding has none.

    Attributes:
        begin, end: the marks; padding is `end`, which no position attends to.

    Args:
        ends: bool by token: whether it ends a line.
        pairs: "reverse" or "copy".
        source_len, target_len: positions of a sample.
    """

    losses_per_sample: int | None = None

    def __init__(self, split: Split, ends: npt.NDArray[np.bool_], pairs: str, source_len: int, target_len: int) -> None:
        if target_len < 2:
            raise UserError(
                f"model.target_len = {target_len}: a target is a token of a line and its end at the least: 2"
            )
        self.name, self.begin, self.end = split.name, len(ends), len(ends) + 1
        self._split, self._pairs = split, pairs
        self._source_len, self._target_len = source_len, target_len
        borders = split.where(ends)
        firsts, stops = np.append(0, borders + 1), np.append(borders, split.num_tokens)
        filled = stops > firsts
        self._firsts = firsts[filled]
        self._counts = np.minimum(stops[filled] - self._firsts, min(source_len, target_len - 1))
        self.num_samples = len(self._firsts)

    def read(self, numbers: Numbers) -> Samples:
        """inputs and targets int64 [n, source_len + target_len], extras `source_lengths_B`, `target_lengths_B`.
        Raises IndexError: no such sample.
        """
        numbers = in_range(numbers, self.num_samples, self.name)
        source = self._source_len
        inputs = np.full((len(numbers), source + self._target_len), self.end, np.int64)
        targets = np.full_like(inputs, NOTHING)
        inputs[:, source] = self.begin
        counts = self._counts[numbers]
        for row, (number, count) in enumerate(zip(numbers.tolist(), counts.tolist())):
            line = self._split.span(int(self._firsts[number]), count)
            wanted = line[::-1] if self._pairs == "reverse" else line
            inputs[row, :count] = line
            inputs[row, source + 1 : source + 1 + count] = wanted
            targets[row, source : source + count] = wanted
            targets[row, source + count] = self.end
        return Samples(inputs, targets, {"source_lengths_B": counts, "target_lengths_B": counts + 1})

    def losses(self, numbers: Numbers) -> Numbers:
        """The tokens of each line, and its end."""
        return np.asarray(self._counts[numbers] + 1, np.int64)


@dataclass(frozen=True)
class LineDataset(TextDataset):
    """A prepared text whose samples are its lines."""

    pairs: str
    _sources: dict[tuple[str, int, int], LineSource] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def vocab_size(self) -> int:
        """The tokenizer's, and the marks."""
        return self.text.vocab_size + MARKS

    @property
    def description(self) -> dict[str, Any]:
        """The text's description, with `pairs`."""
        return {**self.text.description, "pairs": self.pairs}

    @cached_property
    def fingerprint(self) -> str:
        """Changes with the tokens, the tokenizer, which decides where lines end, and `pairs`."""
        return digest(["lines", VERSION, self.pairs, self.tokenizer_text, self.text.fingerprint])

    def source(self, split: str, seq_len: int, num_targets: int) -> LineSource:
        """The lines of a split: see `AnyDataset`. They are found once.
        Raises UserError: no token ends a line, there is no tokenizer, or a token is outside the vocabulary.
        """
        key = split, seq_len, num_targets
        if key not in self._sources:
            tokens = self.text.train if split == "train" else self.text.validation
            self._sources[key] = LineSource(tokens, self._ends, self.pairs, seq_len - num_targets, num_targets)
        return self._sources[key]

    @cached_property
    def _ends(self) -> npt.NDArray[np.bool_]:
        tokenizer = self.text.tokenizer
        if tokenizer is None:
            raise UserError(f"{self.path}: these token shards come without a tokenizer: nobody knows where lines end")
        ends = line_ends(tokenizer, self.text.vocab_size)
        if not ends.any() and not isinstance(tokenizer, CharTokenizer):
            raise UserError(
                f"{self.path}: this tokenizer drops the ends of lines: no token has one in it, so nobody knows where a "
                'line ends; take data.tokenizer = "byte", "char", "gpt2" or "bpe:VOCAB"'
            )
        if tokenizer.separator is not None:
            ends[tokenizer.separator] = True
        if not ends.any():  # nor are there several documents, each of them a line
            raise UserError(f"{self.path}: the text has no end of a line in it: one line is no corpus")
        return ends


def line_ends(tokenizer: Tokenizer, vocab_size: int) -> npt.NDArray[np.bool_]:
    """Whether the text of each token has a line's end in it; the rest of such a token belongs to no line."""
    known = min(vocab_size, tokenizer.vocab_size)
    ends = np.zeros(vocab_size, np.bool_)
    ends[:known] = ["\n" in tokenizer.decode([token]) for token in range(known)]
    return ends


class Pairs(TextTask):
    """Translate a line into its reverse, or into itself."""

    name = "seq2seq"
    kinds = ("transformer",)
    keys = (*Task.keys, "pairs")
    extras = True
    marks = MARKS

    def open(self, request: TaskRequest, path: Path) -> LineDataset:
        """See `Task`."""
        return LineDataset(open_dataset(path), request.data.pairs)

    def score(self, request: ScoreRequest) -> list[str]:
        """See `Task`; and how many tokens and lines are right."""
        from codescent.models.transformer.module import Transformer  # noqa: PLC0415 - planning does without torch
        from codescent.tasks.pairs.evaluate import score_lines  # noqa: PLC0415

        _, source = request.validation()
        assert isinstance(source, LineSource)
        return score_lines(cast(Transformer, request.make_module()), source, request.device).words()
