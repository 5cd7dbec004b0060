"""In: a folder of prepared windows (a question and a part of its context). Out: samples by number; the questions.
Does not prepare windows (__init__.py does) and does not order samples (data/loader.py does)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from codescent.base.counted import counted
from codescent.base.errors import UserError
from codescent.data.file_array import FileArray
from codescent.data.prepared import SPLITS, Description, Fields, Splits
from codescent.data.samples import Numbers, Samples, in_range
from codescent.tasks.answers.squad import Questions, read_questions
from codescent.tasks.answers.windows import Rows, segments_of
from codescent.tasks.folder import FolderDataset

QUESTIONS = "validation.json"
SHOWN_IDS = 3


class _QuestionSplit(Fields):
    questions: int
    windows: int
    with_answer: int
    misplaced: list[str]
    without_tokens: list[str]


class _QuestionsDescription(Description):
    format: Literal["codescent questions 1"]
    sizes: dict[str, int]
    splits: Splits[_QuestionSplit]


class QuestionSource:
    """The windows of one split (`WindowSizes.dtype`); each has one loss: of the first and last token of its answer."""

    losses_per_sample: int | None = 1

    def __init__(self, name: str, rows: Rows | FileArray) -> None:
        self.name, self.rows, self.num_samples = name, rows, len(rows)

    def read(self, numbers: Numbers) -> Samples:
        """inputs int64 [n, max_length], targets int64 [n, 2], extras `segments_BT` and `lengths_B`.
        Raises IndexError: no such sample; UserError: the file has changed.
        """
        rows = self.rows[in_range(numbers, self.num_samples, self.name)]
        extras = {"segments_BT": segments_of(rows), "lengths_B": rows["length"].astype(np.int64)}
        return Samples(rows["tokens"].astype(np.int64), rows["targets"].astype(np.int64), extras)

    def losses(self, numbers: Numbers) -> Numbers:
        """One for each."""
        return np.ones(len(numbers), np.int64)

    def padding(self, numbers: Numbers) -> Numbers:
        """See `PaddedSource`."""
        rows = self.rows[numbers]
        return np.asarray(rows["tokens"].shape[1] - rows["length"].astype(np.int64), np.int64)


@dataclass(frozen=True)
class QuestionDataset(FolderDataset):
    """Open prepared questions."""

    format = "codescent questions 1"
    form = _QuestionsDescription
    what = "prepared questions"

    @property
    def seq_len(self) -> int:
        """Positions of a window."""
        return int(self.description["sizes"]["max_length"])

    @cached_property
    def train(self) -> QuestionSource:
        """The windows to train on."""
        return QuestionSource("train", self.arrays["train"])

    @cached_property
    def validation(self) -> QuestionSource:
        """The windows of all validation questions."""
        return QuestionSource("validation", self.arrays["validation"])

    def source(self, split: str, seq_len: int, num_targets: int) -> QuestionSource:
        """See `AnyDataset`; `num_targets` is not used. Raises UserError: the windows have another length."""
        if seq_len != self.seq_len:
            raise UserError(f"{self.path}: its windows have {self.seq_len} positions, data.seq_len is {seq_len}")
        return self.train if split == "train" else self.validation

    def questions(self) -> Questions:
        """The validation questions, with contexts and answers; `rows["question"]` are their numbers."""
        return read_questions(self.path / QUESTIONS)

    def summary(self) -> list[str]:
        """See `FolderDataset`."""
        sizes, tokenizer = self.description["sizes"], self.description["tokenizer"]
        lines = [
            f"{self.path}: {tokenizer['kind']}, vocabulary of {self.vocab_size:,}; windows of {sizes['max_length']} "
            f"tokens, {sizes['stride']} apart"
        ]
        for name in SPLITS:
            split = self.description["splits"][name]
            lines.append(
                f"{name}: {counted(split['questions'], 'question')}, {counted(split['windows'], 'window')}, "
                f"{split['with_answer']:,} with the answer"
            )
        return [*lines, *left_out_lines(self.description["splits"])]


def left_out_lines(splits: Mapping[str, Any]) -> list[str]:
    """Lines that name the first questions of each split whose answer cannot be a target; `splits` of a description."""
    lines = []
    for name, split in splits.items():
        for reason, ids in (("not at its answer_start", "misplaced"), ("without tokens", "without_tokens")):
            if found := split[ids]:
                shown = f"{', '.join(found[:SHOWN_IDS])}{', …' * (len(found) > SHOWN_IDS)}"
                left_out = "left out" if name == "train" else "no target"
                lines.append(f"{name}: {counted(len(found), 'question')} with an answer {reason}: {left_out}: {shown}")
    return lines
