"""In: keys of [data]. Out: what a task prepares by them, without a config or a run.
Does not decide what is tested: the tests that import it do."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from codescent.config.sections import Data, Model
from codescent.tasks.answers import Answers
from codescent.tasks.conversations import Conversations
from codescent.tasks.folder import FolderTask
from codescent.tasks.task import TaskRequest


@dataclass(frozen=True)
class Asked:
    """Samples that a task is asked for."""

    task: FolderTask
    request: TaskRequest

    def prepare(self, root: Path, *, progress: bool = False) -> Path:
        return self.task.prepare(self._at(root), progress=progress)

    def locate(self, root: Path) -> Path | None:
        return self.task.locate(self._at(root))

    def key(self) -> dict[str, Any]:
        return self.task.key(self.request)

    def changed(self, **keys: object) -> Asked:
        return replace(self, request=replace(self.request, data=self.request.data.model_copy(update=keys)))

    def _at(self, root: Path) -> TaskRequest:
        return self.changed(folder=root).request


def questions(corpus: str = "squad", **keys: object) -> Asked:
    """Questions; keys may have values that a config refuses."""
    given = {"tokenizer": "bert", "seq_len": 384, **keys}
    return Asked(Answers(), TaskRequest(Data.model_construct(corpus=corpus, **given), Model(kind="bert")))


def responses(corpus: str, tokenizer: str, **keys: object) -> Asked:
    """Prompts and responses, or conversations."""
    data = Data.model_construct(corpus=corpus, tokenizer=tokenizer, **keys)
    return Asked(Conversations(), TaskRequest(data, Model(kind="gpt2")))
