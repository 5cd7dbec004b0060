"""In: questions about contexts. Out: the task "qa": the first and the last token of each answer are wanted.
Does not make samples (source.py does) and does not read answers off logits (evaluate.py does)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from codescent.base.errors import UserError
from codescent.tasks.answers.prepare import SQUAD, QuestionRequest
from codescent.tasks.answers.source import QuestionDataset
from codescent.tasks.answers.windows import WindowSizes
from codescent.tasks.folder import FolderTask
from codescent.tasks.task import Ask, Task, Trial, refuse_no_wordpiece

if TYPE_CHECKING:
    from codescent.config.sections import Data

PREDICTIONS = "predictions.json"


class Answers(FolderTask):
    """Find the answer to a question in its context (Rajpurkar et al. 2016, "SQuAD")."""

    name = head = "qa"
    kinds = ("bert",)
    keys = (*Task.keys, "stride", "question_len", "train_questions")
    peft_task_type = "QUESTION_ANS"
    writes_predictions = True
    dataset = QuestionDataset

    def made_for(self, data: Data) -> bool:
        """See `Task`."""
        return data.corpus == SQUAD or super().made_for(data)

    def vocab_size(self, ask: Ask) -> int | None:
        """See `FolderTask`."""
        refuse_no_wordpiece(self, ask.data)
        return super().vocab_size(ask)

    def request(self, ask: Ask) -> QuestionRequest:
        """See `FolderTask`."""
        data = ask.data
        if (max_length := data.seq_len or ask.positions) is None:
            raise UserError("data.seq_len: how many tokens a window of question and context has; BERT's is 384")
        sizes = WindowSizes(max_length, data.stride, data.question_len)
        return QuestionRequest(
            data.corpus, data.validation, data.tokenizer, sizes, data.train_questions, data.validation_questions
        )

    def scores_files(self, kind: str) -> bool:
        """See `Task`."""
        return True

    def refuse_trial(self, trial: Trial) -> Iterator[str]:
        """See `Task`."""
        out = trial.out or trial.ask.run / PREDICTIONS
        if not os.access(out.parent, os.W_OK):
            yield f"{out}: its folder is not there, or nothing can be written in it"

    def score(self, trial: Trial) -> list[str]:
        """See `Task`; the answers are written and compared with those of the file."""
        from codescent.tasks.answers.evaluate import answer_lines  # noqa: PLC0415 - planning does without torch

        return answer_lines(trial, trial.out or trial.ask.run / PREDICTIONS)
