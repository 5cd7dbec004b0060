"""In: SQuAD or files of its form, a tokenizer, sizes. Out: the folder of their windows: complete or absent.
Does not open the folder (source.py does)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from codescent.base.durable import write_synced
from codescent.base.errors import UserError
from codescent.data.prepared import SPLITS, TOKENIZER, given_sha256, write_array
from codescent.data.progress import stage
from codescent.data.text import download
from codescent.data.text.request import KINDS, tokenizer_of
from codescent.data.tokenizers import wordpiece
from codescent.data.tokenizers.wordpiece import WordPiece
from codescent.tasks.answers.source import QUESTIONS, QuestionDataset
from codescent.tasks.answers.squad import Questions, read_questions, write_questions
from codescent.tasks.answers.windows import WindowSizes, make_windows
from codescent.tasks.folder import Request, tokenizer_identity

SQUAD = "squad"
PUBLISHED = {"train": download.SQUAD_TRAIN, "validation": download.SQUAD_DEV}
_WANTED = (
    "questions are cut by WordPiece: bert, bert-cased, bert:FILE, bert-cased:FILE, or a JSON file of a WordPiece "
    f"tokenizer with {', '.join(wordpiece.CONTROLS)}"
)


@dataclass(frozen=True)
class QuestionRequest(Request):
    """What is to be prepared.

    Attributes:
        corpus: "squad" (v1.1 as published), or a training file of its form.
        validation: a file of that form; None: SQuAD's dev-v1.1.json, which only "squad" has.
        tokenizer: bert, bert-cased, `bert:FILE`, `bert-cased:FILE`, or a WordPiece tokenizer's JSON file.
        sizes: how contexts are cut.
        max_train, max_validation: the first so many questions; None: all.
    """

    dataset = QuestionDataset

    corpus: str = SQUAD
    validation: str | None = None
    tokenizer: str = "bert"
    sizes: WindowSizes = field(default_factory=WindowSizes)
    max_train: int | None = None
    max_validation: int | None = None

    def fields(self) -> dict[str, Any]:
        """See `Request`."""
        return {**asdict(self.sizes), "max_train": self.max_train, "max_validation": self.max_validation}

    def parts(self) -> Mapping[str, Callable[[], Any]]:
        """See `Request`. Published files need not be here."""
        return {**{split: partial(self._sha256, split) for split in SPLITS}, "tokenizer": self._tokenizer_identity}

    def problems(self) -> list[str]:
        """See `Request`."""
        limits = {"max_train": self.max_train, "max_validation": self.max_validation}
        wrong = {name: count for name, count in limits.items() if count is not None and count < 1}
        return self.sizes.problems() + [
            f"{name}: {count} is not a number of questions" for name, count in wrong.items()
        ]

    def write(self, key: dict[str, Any], folder: Path, progress: bool) -> dict[str, Any]:
        """See `Request`."""
        tokenizer = tokenizer_of(self.tokenizer)
        if not isinstance(tokenizer, WordPiece):
            raise UserError(f"tokenizer {self.tokenizer}: {_WANTED}")
        read = {split: self._read(split) for split in SPLITS}  # all refusals before the work
        if changed := [str(found.path) for split, found in read.items() if found.sha256 != key[split]]:
            raise UserError(
                *(f"{path}: changed while it was being read: run the same command again" for path in changed)
            )
        splits = {}
        for split, questions in read.items():
            splits[split] = _write_split(folder / f"{split}.npy", questions, tokenizer, self.sizes, progress)
        write_synced(folder / QUESTIONS, write_questions(read["validation"].questions))
        write_synced(folder / TOKENIZER, tokenizer.text)
        return {
            "sources": {split: str(questions.path) for split, questions in read.items()},
            "tokenizer": {"kind": self.tokenizer, "vocab_size": tokenizer.vocab_size},
            "sizes": asdict(self.sizes),
            "splits": splits,
        }

    def _sha256(self, split: str) -> str:
        path = self._path(split)
        return PUBLISHED[split].sha256 if path is None else given_sha256(path, f"the {split} questions")

    def _tokenizer_identity(self) -> str:
        if self.tokenizer in KINDS and not wordpiece.split_name(self.tokenizer):
            raise UserError(f"tokenizer {self.tokenizer}: {_WANTED}")
        return tokenizer_identity(self.tokenizer, f"tokenizer ({_WANTED})")

    def _read(self, split: str) -> Questions:
        """The questions of a split; published ones are downloaded."""
        path = self._path(split) or download.obtain(PUBLISHED[split])
        return read_questions(path).first(self.max_train if split == "train" else self.max_validation)

    def _path(self, split: str) -> Path | None:
        """The user's file; None: the published one."""
        if split == "validation" and self.validation is not None:
            return Path(self.validation).expanduser()
        if self.corpus == SQUAD:
            return None
        if split == "validation":
            raise UserError(f"{self.corpus}: name a validation file beside it, such as SQuAD's dev-v1.1.json")
        return self.path


def _write_split(
    path: Path, questions: Questions, tokenizer: WordPiece, sizes: WindowSizes, progress: bool
) -> dict[str, Any]:
    """Write the windows of a split; returns their part of the description."""
    characters = sum(len(question.context) for question in questions.questions)
    cuts = []
    with stage(f"cutting {questions.path.name}", characters, progress) as advance:
        for cut in make_windows(questions.questions, tokenizer, sizes, training=path.stem == "train"):
            cuts.append(cut)
            advance(cut.characters)
    whole = np.concatenate([cut.rows for cut in cuts])
    if not len(whole):
        raise UserError(f"{questions.path}: no answer is where the file says: nothing to train on")
    write_array(path, whole)
    return {
        "questions": len(questions.questions),
        "windows": len(whole),
        "with_answer": int((whole["targets"][:, 0] > 0).sum()),
        "misplaced": [name for cut in cuts for name in cut.misplaced],
        "without_tokens": [name for cut in cuts for name in cut.without_tokens],
    }
