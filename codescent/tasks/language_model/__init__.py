"""In: a text. Out: the task "lm": predict each next token.
Does not build samples: data/text/split.py does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from codescent import models
from codescent.base.errors import UserError
from codescent.base.output import warn
from codescent.data.samples import AnyDataset
from codescent.data.tokenizers.tokenizer import Tokenizer
from codescent.hub.cache import weights_place
from codescent.tasks.conversations.chat_files import read_chat_files
from codescent.tasks.conversations.kept import CHAT, exported, file_of, has_chat_template, saved_chat
from codescent.tasks.language_model.separate import SeparateDataset
from codescent.tasks.scores import Scores
from codescent.tasks.task import ScoreRequest, TaskRequest
from codescent.tasks.text import TextTask


class LanguageModel(TextTask):
    """Predict each next token of a text."""

    name = "lm"
    aim = "predict each next token"
    kinds = ("gpt2", "llama", "transformer", "transformers")
    keys = (*TextTask.keys, "documents")
    undivided = ""
    peft_task_type = "CAUSAL_LM"
    scores_files = models.GENERATING
    files = (CHAT,)

    def open(self, request: TaskRequest, path: Path) -> AnyDataset:
        """See `Task`."""
        text = self.text(request, path)
        return SeparateDataset(text) if request.data.documents == "separate" else text

    def carry_unprepared(self, request: TaskRequest) -> Mapping[str, str]:
        """See `Task`: the chat template of the folder, which this task does not use, for an export."""
        if request.model.weights is None or not has_chat_template(folder := weights_place(request.model.weights)):
            return {}
        try:
            return file_of(read_chat_files(folder))
        except UserError as error:
            warn(f"the chat template is not kept: {error}")
            return {}

    def export(
        self,
        request: TaskRequest,
        tokenizer: Tokenizer,
        texts: dict[str, str],
        ends: dict[str, Any],
        *,
        is_trained: bool,
    ) -> tuple[dict[str, str], dict[str, Any]]:
        """See `Task`; with the chat template of an imported run, unchanged."""
        chat = saved_chat(request)
        return (texts if chat is None else exported(chat, texts)), ends

    def score(self, request: ScoreRequest) -> Scores:
        """See `Task`; for a decoder the loss, perplexity and bits per byte of the whole text."""
        from codescent.tasks.language_model.evaluate import score_text  # noqa: PLC0415 - planning does without torch

        return score_text(request) if models.generates(request.task.kind) else super().score(request)
