"""In: a text. Out: the task "lm": predict each next token.
Does not build samples: data/text/split.py does."""

from __future__ import annotations

from codescent import models
from codescent.tasks.task import ScoreRequest
from codescent.tasks.text import TextTask


class LanguageModel(TextTask):
    """Predict each next token of a text."""

    name = "lm"
    aim = "predict each next token"
    kinds = ("gpt2", "llama", "transformer")
    peft_task_type = "CAUSAL_LM"
    scores_files = models.GENERATING

    def score(self, request: ScoreRequest) -> list[str]:
        """See `Task`; for a decoder the loss, perplexity and bits per byte of the whole text."""
        from codescent.tasks.language_model.evaluate import text_lines  # noqa: PLC0415 - planning does without torch

        return text_lines(request) if request.task.kind in models.GENERATING else super().score(request)
