"""In: SQuAD or files of its form, a tokenizer, sizes. Out: the folder of their windows: complete or absent.
Does not open the folder (source.py does)."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from codescent.base.durable import write_synced
from codescent.base.errors import UserError
from codescent.data.prepared import (
    SPLITS,
    TOKENIZER,
    describe,
    existing,
    folder_of,
    given_sha256,
    prepared,
    write_array,
)
from codescent.data.progress import stage
from codescent.data.text import download
from codescent.data.text.request import KINDS, tokenizer_of
from codescent.data.tokenizers import wordpiece
from codescent.data.tokenizers.wordpiece import WordPiece
from codescent.tasks.answers.source import FORMAT, QUESTIONS, is_question_folder, open_questions
from codescent.tasks.answers.squad import Questions, read_questions, write_questions
from codescent.tasks.answers.windows import WindowSizes, make_windows

SQUAD = "squad"
PUBLISHED = {"train": download.SQUAD_TRAIN, "validation": download.SQUAD_DEV}


@dataclass(frozen=True)
class QuestionRequest:
    """What is to be prepared.

    Attributes:
        corpus: "squad" (v1.1 as published), or a training file of its form.
        validation: a file of that form; None: SQuAD's dev-v1.1.json, which only "squad" has.
        tokenizer: bert, bert-cased, `bert:FILE`, `bert-cased:FILE`, or a WordPiece tokenizer's JSON file; None: bert.
        sizes: how contexts are cut.
        max_train, max_validation: the first so many questions; None: all.
    """

    corpus: str = SQUAD
    validation: str | None = None
    tokenizer: str | None = None
    sizes: WindowSizes = field(default_factory=WindowSizes)
    max_train: int | None = None
    max_validation: int | None = None

    def key(self) -> dict[str, Any]:
        """What the windows depend on: the files' content, the tokenizer's, sizes and limits.

        Raises:
            UserError: all that is wrong with what was asked for.
        """
        problems = self.sizes.problems()
        problems += [
            f"{name}: {count} is not a number of questions"
            for name, count in (("max_train", self.max_train), ("max_validation", self.max_validation))
            if count is not None and count < 1
        ]
        key: dict[str, Any] = {"format": FORMAT, **asdict(self.sizes)}
        key |= {"max_train": self.max_train, "max_validation": self.max_validation}
        for split in SPLITS:
            try:
                path = self._path(split)
                key[split] = PUBLISHED[split].sha256 if path is None else given_sha256(path, f"the {split} questions")
            except UserError as error:
                problems += error.problems
        try:
            key["tokenizer"] = _tokenizer_identity(self.tokenizer or "bert")
        except UserError as error:
            problems += error.problems
        if problems:
            raise UserError(*problems)
        return key

    def read(self, split: str) -> Questions:
        """The questions of a split; published ones are downloaded.

        Raises:
            UserError: not there, or not of SQuAD's form.
        """
        path = self._path(split) or download.obtain(PUBLISHED[split])
        return read_questions(path).first(self.max_train if split == "train" else self.max_validation)

    def _path(self, split: str) -> Path | None:
        """The user's file; None: the published one."""
        if split == "train":
            return None if self.corpus == SQUAD else Path(self.corpus).expanduser()
        if self.validation is not None:
            return Path(self.validation).expanduser()
        if self.corpus == SQUAD:
            return None
        raise UserError(f"{self.corpus}: name a validation file beside it, such as SQuAD's dev-v1.1.json")


def locate_questions(request: QuestionRequest, root: Path) -> Path | None:
    """The prepared windows of a request, if they are there. Published files need not be here for that.

    Raises:
        UserError: all that is wrong with the request.
    """
    if is_question_folder(Path(request.corpus).expanduser()):
        return Path(request.corpus).expanduser()
    return existing(folder_of(root, request.key(), request.corpus, request.tokenizer or "bert"), open_questions)


def prepare_questions(request: QuestionRequest, root: Path, *, progress: bool = False) -> Path:
    """Like `locate_questions`, but cuts the windows where they are not there; `progress` shows bars or lines.

    Raises:
        UserError: anything wrong with the request, the files or the disk. Nothing half-made is left.
    """
    if is_question_folder(Path(request.corpus).expanduser()):
        return Path(request.corpus).expanduser()
    key = request.key()
    target = folder_of(root, key, request.corpus, request.tokenizer or "bert")
    return prepared(target, lambda folder: _make(request, key, folder, progress), open_questions)


def _make(request: QuestionRequest, key: dict[str, Any], folder: Path, progress: bool) -> None:
    """Write all files; the description, which makes the folder a dataset, last."""
    tokenizer = _tokenizer(request.tokenizer or "bert")
    described = {}
    read = {split: request.read(split) for split in SPLITS}  # all refusals before the work
    if changed := [str(found.path) for split, found in read.items() if found.sha256 != key[split]]:
        raise UserError(*(f"{path}: changed while it was being read: run the same command again" for path in changed))
    for split, questions in read.items():
        described[split] = _write_split(folder / f"{split}.npy", questions, tokenizer, request.sizes, progress)
    write_synced(folder / QUESTIONS, write_questions(read["validation"].questions))
    write_synced(folder / TOKENIZER, tokenizer.text)
    fields = {
        "format": FORMAT,
        "request": key,
        "sources": {split: str(questions.path) for split, questions in read.items()},
        "tokenizer": {"kind": request.tokenizer or "bert", "vocab_size": tokenizer.vocab_size},
        "sizes": asdict(request.sizes),
        "splits": described,
    }
    describe(folder, fields, (*(f"{split}.npy" for split in SPLITS), QUESTIONS, TOKENIZER))


def _write_split(
    path: Path, questions: Questions, tokenizer: WordPiece, sizes: WindowSizes, progress: bool
) -> dict[str, Any]:
    """Write the windows of a split; returns their part of the description."""
    cuts = []
    characters = sum(len(question.context) for question in questions.questions)
    with stage(f"cutting {questions.path.name}", characters, progress) as advance:
        for cut in make_windows(questions.questions, tokenizer, sizes, training=path.stem == "train"):
            cuts.append(cut)
            advance(cut.characters)
    whole = np.concatenate([cut.rows for cut in cuts])
    if not len(whole):
        raise UserError(f"{questions.path}: no answer is where the file says: nothing to train on")
    write_array(path, whole)
    return {
        "questions": len(questions),
        "windows": len(whole),
        "with_answer": int((whole["targets"][:, 0] > 0).sum()),
        "misplaced": [name for cut in cuts for name in cut.misplaced],
        "without_tokens": [name for cut in cuts for name in cut.without_tokens],
    }


def _tokenizer_identity(name: str) -> str:
    if wordpiece.split_name(name):
        return wordpiece.identity(name)
    if name in KINDS:
        raise UserError(f"tokenizer {name}: {_WANTED}")
    return f"file:{given_sha256(Path(name).expanduser(), f'tokenizer ({_WANTED})')}"


def _tokenizer(name: str) -> WordPiece:
    found = tokenizer_of(name)
    if not isinstance(found, WordPiece):
        raise UserError(f"tokenizer {name}: {_WANTED}")
    return found


_WANTED = (
    "questions are cut by WordPiece: bert, bert-cased, bert:FILE, bert-cased:FILE, or a JSON file of a WordPiece "
    f"tokenizer with {', '.join(wordpiece.CONTROLS)}"
)
