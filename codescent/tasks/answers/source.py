"""In: a folder of prepared question windows. Out: its samples by number, memory-mapped, and the questions themselves.
Does not prepare them (prepare.py does) and does not order them (data/loader.py does)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from codescent.base.errors import UserError
from codescent.data.prepared import SPLITS, TOKENIZER, Described, Part, Splits, described, fingerprint_of, noted
from codescent.data.samples import Numbers, Samples, in_range
from codescent.tasks.answers.squad import Questions, read_questions
from codescent.tasks.answers.windows import Rows, WindowSizes, segments_of

FORMAT = "codescent questions 1"
QUESTIONS = "validation.json"


class _Split(Part):
    questions: int
    windows: int
    with_answer: int
    misplaced: list[str]
    without_tokens: list[str]


class _Description(Described):
    format: Literal["codescent questions 1"]
    sizes: dict[str, int]
    splits: Splits[_Split]


class QuestionSource:
    """The windows of one split; a window has one loss: where its answer begins and ends.

    Attributes:
        rows: the windows as they were made, of the dtype of `WindowSizes.dtype`.
    """

    def __init__(self, name: str, rows: Rows) -> None:
        self.name = name
        self.rows = rows
        self.num_samples = len(rows)
        self.losses_per_sample: int | None = 1

    def read(self, numbers: Numbers) -> Samples:
        """inputs int64 [n, max_length], targets int64 [n, 2], extras `segments_BT` and `lengths_B`.

        Raises:
            IndexError: no such sample.
        """
        numbers = in_range(numbers, self.num_samples, self.name)
        rows = self.rows[numbers]
        extras = {"segments_BT": segments_of(rows), "lengths_B": rows["length"].astype(np.int64)}
        return Samples(rows["tokens"].astype(np.int64), rows["targets"].astype(np.int64), extras)

    def losses(self, numbers: Numbers) -> Numbers:
        """One for each."""
        return np.ones(len(numbers), np.int64)


@dataclass(frozen=True)
class QuestionDataset:
    """Prepared questions, open.

    Attributes:
        seq_len: positions of a window.
        description: all of description.json.
        fingerprint: changes with any byte of the windows.
    """

    path: Path
    vocab_size: int
    seq_len: int
    train: QuestionSource
    validation: QuestionSource
    description: dict[str, Any]
    fingerprint: str

    @property
    def tokenizer_text(self) -> str:
        """The text of the tokenizer's file."""
        return (self.path / TOKENIZER).read_text(encoding="utf-8")

    def source(self, split: str, seq_len: int, num_targets: int) -> QuestionSource:
        """The windows of a split. `num_targets` is not used: an answer is wanted of each window.

        Raises:
            UserError: the windows have another length.
        """
        if seq_len != self.seq_len:
            raise UserError(f"{self.path}: its windows have {self.seq_len} positions, data.seq_len is {seq_len}")
        return self.train if split == "train" else self.validation

    def questions(self) -> Questions:
        """The questions of the validation split, with contexts and answers; `rows["question"]` are their numbers.

        Raises:
            UserError: their file is not as it was made.
        """
        return read_questions(self.path / QUESTIONS)

    def verify(self) -> None:
        """Nothing: every byte was compared when it was opened."""

    def summary(self) -> list[str]:
        """What `codescent data` prints."""
        sizes, tokenizer = self.description["sizes"], self.description["tokenizer"]
        lines = [
            f"{self.path}: {tokenizer['kind']}, vocabulary of {self.vocab_size:,}; windows of {sizes['max_length']} "
            f"tokens, {sizes['stride']} apart"
        ]
        for name in SPLITS:
            split = self.description["splits"][name]
            lines.append(
                f"{name}: {split['questions']:,} questions, {split['windows']:,} windows, "
                f"{split['with_answer']:,} with the answer"
            )
            for reason, ids in (("not where the file says", "misplaced"), ("of no token", "without_tokens")):
                if found := split[ids]:
                    shown = f"{', '.join(found[:3])}{', …' * (len(found) > 3)}"
                    left_out = "left out" if name == "train" else "no target"
                    lines.append(f"{name}: {len(found):,} questions with an answer {reason}: {left_out}: {shown}")
        return lines


def is_question_folder(path: Path) -> bool:
    """Whether a folder says that it holds prepared questions."""
    return noted(path).get("format") == FORMAT


def open_questions(path: Path) -> QuestionDataset:
    """Open prepared questions; every file is compared with its sha256.

    Raises:
        UserError: there are none, or every file that is damaged.
    """
    description = described(path, _Description, "prepared questions")
    fingerprint = fingerprint_of(path, description["files"])
    sources = [QuestionSource(name, np.load(path / f"{name}.npy", mmap_mode="r")) for name in SPLITS]
    vocab_size, sizes = description["tokenizer"]["vocab_size"], WindowSizes(**description["sizes"])
    return QuestionDataset(path, vocab_size, sizes.max_length, sources[0], sources[1], description, fingerprint)
