"""In: a text corpus and a tokenizer. Out: base classes of tasks and datasets whose samples come from token shards.
Does not build samples: the subclasses do."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from codescent.data.samples import AnyDataset
from codescent.data.text.dataset import Dataset, locate, open_dataset, vocab_size_of
from codescent.data.text.prepare import prepare
from codescent.tasks.task import VOCAB_SIZES, Task, TaskRequest


@dataclass(frozen=True)
class TextDataset:
    """A prepared text. The subclass of a task adds `source` and `fingerprint`."""

    text: Dataset

    @property
    def path(self) -> Path:
        """See `AnyDataset`."""
        return self.text.path

    @property
    def vocab_size(self) -> int:
        """The tokenizer's vocabulary size."""
        return self.text.vocab_size

    @property
    def description(self) -> dict[str, Any]:
        """The text's description."""
        return self.text.description

    @property
    def earlier(self) -> str | None:
        """See `AnyDataset`."""
        if self.text.earlier is None:
            return None
        return replace(self, text=replace(self.text, fingerprint=self.text.earlier, earlier=None)).fingerprint

    @property
    def fingerprint(self) -> str:
        """See `AnyDataset`."""
        raise NotImplementedError

    @property
    def tokenizer_text(self) -> str | None:
        """See `AnyDataset`."""
        return self.text.tokenizer_text


class TextTask(Task):
    """A task whose corpus is text. Its vocabulary is the tokenizer's and `marks` further ids."""

    marks = 0

    def vocab_size(self, request: TaskRequest) -> int | None:
        """See `Task`; read from the prepared tokens if they exist."""
        found = self.locate(request)
        if found is not None:
            return vocab_size_of(found) + self.marks
        kind, _, size = request.data.tokenizer.partition(":")
        known = int(size) if kind == "bpe" else VOCAB_SIZES.get(request.data.tokenizer)
        return None if known is None else known + self.marks

    def locate(self, request: TaskRequest) -> Path | None:
        """See `Task`."""
        data = request.data
        cut, key = data.validation_fraction, data.text_key
        return locate(data.corpus, data.tokenizer, data.folder, validation_fraction=cut, text_key=key)

    def prepare(self, request: TaskRequest, *, progress: bool) -> Path:
        """See `Task`."""
        data = request.data
        cut, key = data.validation_fraction, data.text_key
        return prepare(
            data.corpus, data.tokenizer, data.folder, validation_fraction=cut, text_key=key, progress=progress
        )

    def open(self, request: TaskRequest, path: Path) -> AnyDataset:
        """See `Task`."""
        return open_dataset(path)
