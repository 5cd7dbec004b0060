"""In: questions about contexts. Out: the task "qa": predict the first and the last token of each answer.
Does not cut contexts (windows.py does), build samples (source.py does) or find answers in logits (evaluate.py does)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from codescent import models
from codescent.base.durable import write_synced
from codescent.base.errors import UserError, of_each
from codescent.base.home import expanded
from codescent.data.prepared import SPLITS, TOKENIZER, user_file_sha256, write_array
from codescent.data.progress import stage
from codescent.data.text import corpora, download
from codescent.data.text.request import KINDS, tokenizer_of
from codescent.data.tokenizers import wordpiece
from codescent.data.tokenizers.wordpiece import WordPiece
from codescent.tasks.answers.source import QUESTIONS, QuestionDataset, left_out_lines
from codescent.tasks.answers.squad import Questions, has_questions, read_questions, write_questions
from codescent.tasks.answers.windows import CONTROLS, WindowSizes, make_windows
from codescent.tasks.folder import FolderTask, tokenizer_identity
from codescent.tasks.masked_tokens import refuse_no_wordpiece
from codescent.tasks.scores import Scores
from codescent.tasks.task import ScoreRequest, Task, TaskRequest

if TYPE_CHECKING:
    from codescent.config.sections import Data

PREDICTIONS = "predictions.json"
SQUAD = "squad"
PUBLISHED = {"train": download.SQUAD_TRAIN, "validation": download.SQUAD_DEV}
_WANTED = (
    "questions need a WordPiece tokenizer: bert, bert-cased, bert:FILE, bert-cased:FILE, or a JSON file of a WordPiece "
    f"tokenizer with {', '.join(wordpiece.CONTROLS)}"
)


class Answers(FolderTask):
    """Find the answer to a question in its context (Rajpurkar et al. 2016, "SQuAD").
    The corpus is "squad" (v1.1 as published), or a training file in SQuAD's format.
    """

    name = head = "qa"
    aim = "find the answer to a question in its context"
    form = "questions in SQuAD's form"
    kinds = ("bert",)
    undivided = "a sample is a question and a window of its context"
    keys = (*Task.keys, "stride", "question_len", "train_questions")
    reads = ("validation_questions",)
    ignores = ("data.validation_fraction", "data.text_key", "data.as_text", "train.head_chunk_tokens")
    peft_task_type = "QUESTION_ANS"
    scores_files = kinds
    mixes = False  # its scores are of the questions of one file
    dataset = QuestionDataset
    published = MappingProxyType({SQUAD: "bert_squad"})

    def made_for(self, data: Data) -> bool:
        """See `Task`."""
        return data.corpus == SQUAD or super().made_for(data) or (not data.as_text and self.also_text(data.corpus))

    def also_text(self, corpus: str) -> bool:
        """See `Task`: a file in SQuAD's form."""
        path = expanded(corpus)
        return corpus not in (SQUAD, *corpora.NAMES) and path.is_file() and has_questions(path)

    def unpreparable(self, request: TaskRequest) -> Iterator[str]:
        """See `Task`: sizes of windows that leave no room for a context."""
        yield from _sizes(request).problems(_positions(request))

    def remarks(self, request: TaskRequest) -> Iterator[str]:
        """See `Task`: windows that do not overlap."""
        sizes = _sizes(request)
        room = sizes.max_length - sizes.max_question - CONTROLS
        if not sizes.problems() and sizes.stride >= room:
            yield (
                f"data.stride = {sizes.stride}: a window has {room} tokens of a context beside the longest question, "
                "so windows do not overlap, and an answer across the end of one is in none: give data.stride = "
                f"{max(1, room // 2)}"
            )

    def vocab_size(self, request: TaskRequest) -> int | None:
        """See `Task`."""
        refuse_no_wordpiece(self, request.data)
        return super().vocab_size(request)

    def parts(self, request: TaskRequest) -> Mapping[str, Any]:
        """See `FolderTask`. Published files are not read, because their sha256 is known."""
        data, sizes = request.data, _sizes(request)
        return {
            **asdict(sizes),
            "max_length": partial(sizes.checked_length, _positions(request)),
            "max_train": data.train_questions,
            "max_validation": data.validation_questions,
            **{split: partial(_sha256, data, split) for split in SPLITS},
            "tokenizer": partial(_identity, data.tokenizer),
        }

    def key(self, request: TaskRequest) -> dict[str, Any]:
        """See `FolderTask`. With another problem, published files of another size are named, too."""
        try:
            return super().key(request)
        except UserError as error:
            raise UserError(*error.problems, *_resized(request.data)) from error

    def prepared_with(self, description: Mapping[str, Any]) -> Mapping[str, Any]:
        """See `FolderTask`."""
        before = super().prepared_with(description)
        names = {"question_len": "max_question", **{f"{split}_questions": f"max_{split}" for split in SPLITS}}
        return {**before, **{name: before.get(recorded) for name, recorded in names.items()}}

    def write(self, request: TaskRequest, key: dict[str, Any], folder: Path, progress: bool) -> dict[str, Any]:
        """See `FolderTask`."""
        data, sizes, tokenizer = request.data, _sizes(request), tokenizer_of(request.data.tokenizer)
        if not isinstance(tokenizer, WordPiece):
            raise UserError(f"tokenizer {data.tokenizer}: {_WANTED}")
        limits = {"train": data.train_questions, "validation": data.validation_questions}
        read = of_each(  # every problem is found before the long work
            SPLITS,
            lambda split: read_questions(_path(data, split) or download.obtain(PUBLISHED[split]), limits[split]),
        )
        if changed := [found.path for split, found in read.items() if found.sha256 != key[split]]:
            raise UserError(
                *(f"{path}: changed while it was being read: run the same command again" for path in changed)
            )
        splits = {
            split: _write_split(folder / f"{split}.npy", questions, tokenizer, sizes, progress)
            for split, questions in read.items()
        }
        write_synced(folder / QUESTIONS, write_questions(read["validation"].questions))
        write_synced(folder / TOKENIZER, tokenizer.text)
        return {
            "sources": {split: str(questions.path) for split, questions in read.items()},
            "tokenizer": {"kind": data.tokenizer, "vocab_size": tokenizer.vocab_size},
            "sizes": asdict(sizes),
            "splits": splits,
        }

    def remarks_on(self, fields: Mapping[str, Any]) -> list[str]:
        """See `FolderTask`: questions without a target."""
        return left_out_lines(fields["splits"])

    def missing_files(self, data: Data, *, has_corpus: bool) -> list[str]:
        """See `Task`; questions of the user need a validation file."""
        missing = super().missing_files(data, has_corpus=has_corpus)
        has_validation = data.corpus == SQUAD or self.dataset.is_at(data.corpus) or data.validation is not None
        return [*missing, *([] if has_validation else ["validation"])]

    def refuse_score(self, request: ScoreRequest) -> Iterator[str]:
        """See `Task`."""
        out = request.out or request.task.run / PREDICTIONS
        if not os.access(out.parent, os.W_OK):
            yield f"{out}: its folder does not exist, or is not writable"

    def score(self, request: ScoreRequest) -> Scores:
        """See `Task`; writes the predicted answers and compares them with the right ones."""
        from codescent.tasks.answers.evaluate import score_answers  # noqa: PLC0415 - planning does without torch

        return score_answers(request, request.out or request.task.run / PREDICTIONS)


def _positions(request: TaskRequest) -> int | None:
    """Positions of the model; None: not given."""
    model = request.model
    return model.seq_len or (None if model.preset is None else models.preset_positions(model.preset))


def _sizes(request: TaskRequest) -> WindowSizes:
    max_length = request.data.seq_len or _positions(request)
    if max_length is None:
        raise UserError("data.seq_len: give the number of tokens of a window of question and context; BERT's is 384")
    return WindowSizes(max_length, request.data.stride, request.data.question_len)


def _path(data: Data, split: str) -> Path | None:
    """The user's file; None: the published one."""
    if split == "validation" and data.validation is not None:
        return None if data.validation == SQUAD else expanded(data.validation)
    if data.corpus == SQUAD:
        return None
    if split == "validation":
        raise UserError(f"{data.corpus}: name a validation file too (data.validation), such as SQuAD's dev-v1.1.json")
    return expanded(data.corpus)


def _sha256(data: Data, split: str) -> str:
    path = _path(data, split)
    return PUBLISHED[split].sha256 if path is None else user_file_sha256(path, f"the {split} questions")


def _resized(data: Data) -> list[str]:
    """The published files of another size."""
    try:
        published = [PUBLISHED[split] for split in SPLITS if _path(data, split) is None]
    except UserError:  # a file is not given, which is said already
        return []
    return [problem for one in published for problem in download.resized(one)]


def _identity(tokenizer: str) -> str:
    if tokenizer in KINDS and not wordpiece.split_name(tokenizer):
        raise UserError(f"tokenizer {tokenizer}: {_WANTED}")
    return tokenizer_identity(tokenizer, f"tokenizer ({_WANTED})")


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
        raise UserError(f"{questions.path}: no answer is at its answer_start: there is nothing to train on")
    write_array(path, whole)
    return {
        "questions": len(questions.questions),
        "windows": len(whole),
        "with_answer": int((whole["targets"][:, 0] > 0).sum()),
        "misplaced": [name for cut in cuts for name in cut.misplaced],
        "without_tokens": [name for cut in cuts for name in cut.without_tokens],
    }
