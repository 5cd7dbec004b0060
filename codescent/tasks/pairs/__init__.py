"""In: a text. Out: the task "seq2seq": of each line its reverse, or its copy, is wanted.
Does not make samples: source.py does."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from codescent.data.text.dataset import open_dataset
from codescent.tasks.pairs.source import MARKS, LineDataset, LineSource
from codescent.tasks.task import Ask, Task, Trial
from codescent.tasks.text import TextTask


class Pairs(TextTask):
    """Read a line, write it reversed or as it is."""

    name = "seq2seq"
    kinds = ("transformer",)
    keys = (*Task.keys, "pairs")
    extras = True
    marks = MARKS

    def open(self, ask: Ask, path: Path) -> LineDataset:
        """See `Task`."""
        return LineDataset(open_dataset(path), ask.data.pairs)

    def score(self, trial: Trial) -> list[str]:
        """See `Task`; and how many tokens and lines are right."""
        from codescent.models.transformer.module import Transformer  # noqa: PLC0415 - planning does without torch
        from codescent.tasks.pairs.evaluate import score_lines  # noqa: PLC0415

        _, source = trial.validation()
        assert isinstance(source, LineSource)
        return score_lines(cast(Transformer, trial.make_module()), source, trial.device).words()
