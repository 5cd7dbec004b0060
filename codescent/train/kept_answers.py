"""In: the answers of steps and validations, their rewards. Out: some of them in the run folder, as text.
Does not write files (record/answers.py does). Only rank 0 keeps any: those to its first prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from codescent.data.samples import AnswerTokens, Numbers, PromptSource
from codescent.train.open import OpenRun

MOST_STEPS = 500
"""Steps of a run whose answers are kept, at most."""
MOST_ANSWERS = 16
"""Answers of a step that are kept."""

Answers = Sequence[Sequence[AnswerTokens]]


class KeptAnswers:
    """Keeps the answers of the first step, of steps with a line on the terminal, and of each validation.

    A long run keeps those of fewer steps: at most `MOST_STEPS`.
    """

    def __init__(self, run: OpenRun, source: PromptSource) -> None:
        self.run, self.source, steps = run, source, run.config.train.num_steps
        self.every = max(run.config.log.every, -(-steps // MOST_STEPS))

    def training(self, step: int, numbers: Numbers, answers: Answers, rewards: npt.NDArray[Any]) -> None:
        """The answers of step `step` (from 1)."""
        if step == 1 or step % self.every == 0:
            self._write(step, "train", numbers, answers, rewards)

    def validation(self, step: int, numbers: Numbers, answers: Answers, rewards: npt.NDArray[Any]) -> None:
        """The answers of the first pass of a validation after step `step`."""
        self._write(step, "validation", numbers, answers, rewards)

    def _write(self, step: int, split: str, numbers: Numbers, answers: Answers, rewards: npt.NDArray[Any]) -> None:
        if self.run.folder is None:
            return
        shown = self.source.shown(int(numbers[0]), answers[0][:MOST_ANSWERS])
        texts = shown.pop("answers")
        kept = [
            {"text": text, "reward": reward, "tokens": len(answer.tokens), "cut": answer.cut}
            for text, reward, answer in zip(texts, np.asarray(rewards[0]).tolist(), answers[0], strict=False)
        ]
        self.run.folder.write_answers({"step": step, "split": split, **shown, "answers": kept})
