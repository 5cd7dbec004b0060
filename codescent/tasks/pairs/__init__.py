"""In: the tokens of a text. Out: the task "seq2seq": a sample is a line; its target is the line reversed, or copied.
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
from codescent.data.samples import NO_TARGET, Numbers, Samples, in_range
from codescent.data.text.split import Split
from codescent.data.tokenizers.tokenizer import CharTokenizer, Tokenizer
from codescent.tasks.scores import Scores
from codescent.tasks.task import ScoreRequest, Task, TaskRequest
from codescent.tasks.text import TextDataset, TextTask

MARKS = 2
"""Two ids after the tokenizer's: the first, vocab_size - 2, begins a target; the second ends it."""

VERSION = 2  # increase it when the function from a line to a sample changes


class LineSource:
    """The lines of a split that are not empty, in order, each cut to the length that fits into source and target.

    The encoder reads the line and padding. The decoder reads `begin`, the line's tokens in the target's order, and
    padding. Its targets are the line's tokens in the target's order and `end`; padding has no target.

    Attributes:
        begin, end: the ids of the two marks. Padding is also `end`, but no position attends to padding.

    Args:
        ends: bool by token id: whether the token ends a line.
        pairs: "reverse" or "copy".
        source_len, target_len: positions of a sample.
    """

    losses_per_sample: int | None = None

    def __init__(self, split: Split, ends: npt.NDArray[np.bool_], pairs: str, source_len: int, target_len: int) -> None:
        if target_len < 2:
            raise UserError(
                f"model.target_len = {target_len}: a target needs at least 2 positions: a token of a line, and its end"
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
        targets = np.full_like(inputs, NO_TARGET)
        inputs[:, source] = self.begin
        counts = self._counts[numbers]
        for row, (number, count) in enumerate(zip(numbers.tolist(), counts.tolist())):
            line = self._split.span(int(self._firsts[number]), count)
            target = line[::-1] if self._pairs == "reverse" else line
            inputs[row, :count] = line
            inputs[row, source + 1 : source + 1 + count] = target
            targets[row, source : source + count] = target
            targets[row, source + count] = self.end
        return Samples(inputs, targets, {"source_lengths_B": counts, "target_lengths_B": counts + 1})

    def losses(self, numbers: Numbers) -> Numbers:
        """The number of tokens of each line, and 1 for its end."""
        return np.asarray(self._counts[numbers] + 1, np.int64)

    def padding(self, numbers: Numbers) -> Numbers:
        """See `PaddedSource`: of source and target."""
        return np.asarray(self._source_len + self._target_len - 1 - 2 * self._counts[numbers], np.int64)


@dataclass(frozen=True)
class LineDataset(TextDataset):
    """A prepared text whose samples are its lines."""

    pairs: str
    _sources: dict[tuple[str, int, int], LineSource] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def vocab_size(self) -> int:
        """The tokenizer's vocabulary size and MARKS."""
        return self.text.vocab_size + MARKS

    @property
    def description(self) -> dict[str, Any]:
        """The text's description, with `pairs`."""
        return {**self.text.description, "pairs": self.pairs}

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the tokens, of the tokenizer (it decides where lines end), and of `pairs`."""
        return digest(["lines", VERSION, self.pairs, self.tokenizer_text, self.text.fingerprint])

    def source(self, split: str, seq_len: int, num_targets: int) -> LineSource:
        """The lines of a split: see `AnyDataset`. A second call returns the same object.
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
            raise UserError(f"{self.path}: these token shards have no tokenizer: it is needed to find lines")
        ends = line_ends(tokenizer, self.text.vocab_size)
        if not ends.any() and not isinstance(tokenizer, CharTokenizer):
            raise UserError(
                f"{self.path}: this tokenizer drops the ends of lines: none of its tokens has one, so lines cannot be "
                'found; take data.tokenizer = "byte", "char", "gpt2" or "bpe:VOCAB"'
            )
        if tokenizer.separator is not None:
            ends[tokenizer.separator] = True
        if not ends.any():  # and no separator, which would end a line too
            raise UserError(f"{self.path}: the text has no end of a line: a corpus needs more than one line")
        return ends


def line_ends(tokenizer: Tokenizer, vocab_size: int) -> npt.NDArray[np.bool_]:
    """Bool [vocab_size]: whether the token's text has the end of a line. Other text of such a token is dropped."""
    known = min(vocab_size, tokenizer.vocab_size)
    ends = np.zeros(vocab_size, np.bool_)
    ends[:known] = ["\n" in tokenizer.decode([token]) for token in range(known)]
    return ends


class Pairs(TextTask):
    """Predict the reverse of a line, or its copy."""

    name = "seq2seq"
    aim = "write a line reversed, or copy it"
    kinds = ("transformer",)
    undivided = "a sample is one line and its target"
    keys = (*Task.keys, "pairs")
    extras = True
    equal_losses = False
    marks = MARKS

    def open(self, request: TaskRequest, path: Path) -> LineDataset:
        """See `Task`."""
        return LineDataset(self.text(request, path), request.data.pairs)

    def score(self, request: ScoreRequest) -> Scores:
        """See `Task`; also prints how many tokens and lines are right."""
        from codescent.models.transformer.module import Transformer  # noqa: PLC0415 - planning does without torch
        from codescent.tasks.pairs.evaluate import score_lines  # noqa: PLC0415

        _, source = request.validation(self)
        assert isinstance(source, LineSource)
        return score_lines(cast(Transformer, request.make_module()), source, request.device).scores()
