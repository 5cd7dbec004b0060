"""In: a text corpus and a tokenizer. Out: base classes of tasks and datasets whose samples come from token shards.
Does not build samples: the subclasses do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from codescent.data.samples import AnyDataset
from codescent.data.text import corpora
from codescent.data.text.dataset import Dataset, is_tokenizer_of, locate, open_dataset, token_shards, vocab_size_of
from codescent.data.text.prepare import prepare
from codescent.data.text.records import Reading
from codescent.data.text.request import ALL_TRAIN
from codescent.data.text.validation import is_prepared, validated_on, validation_shards
from codescent.tasks.task import VOCAB_SIZES, Task, TaskRequest, is_given

if TYPE_CHECKING:
    from codescent.config.sections import Data


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
    reads_text = True

    def vocab_size(self, request: TaskRequest) -> int | None:
        """See `Task`; read from the prepared tokens if they exist."""
        found = _located(request.data)
        if found is not None:
            return vocab_size_of(found, both=request.data.validation is None) + self.marks
        kind, _, size = request.data.tokenizer.partition(":")
        known = int(size) if kind == "bpe" else VOCAB_SIZES.get(request.data.tokenizer)
        return None if known is None else known + self.marks

    def locate(self, request: TaskRequest) -> Path | None:
        """See `Task`."""
        data, found = request.data, _located(request.data)
        if found is None or data.validation is None:
            return found
        corpus = open_dataset(found, both=False)
        return found if is_prepared(corpus, data.validation, data.folder, _reading(data)) else None

    def unused(self, request: TaskRequest) -> Iterator[tuple[str, str]]:
        """See `Task`: keys for text, if the corpus is token shards; the column of the text, if there are no columns."""
        data = request.data
        shards = token_shards(data.corpus)
        if shards is not None:
            why = f"is for text, and {data.corpus} is token shards"
            yield "data.validation_fraction", why
            if not is_tokenizer_of(shards, data.tokenizer):
                yield "data.tokenizer", f"{why}, which have a tokenizer already"
        texts = [data.corpus] if shards is None else []
        if data.validation is not None and validation_shards(data.validation) is None:
            texts.append(data.validation)
        if not texts:
            yield "data.as_text", f"is for text, and {data.corpus} is token shards"
        if is_given(data, "text_key") and data.as_text:
            yield "data.text_key", "is for JSON lines and tables, and data.as_text reads every file as plain text"
        elif is_given(data, "text_key") and not any(corpora.may_have_columns(text) for text in texts):
            yield "data.text_key", f"needs JSON lines or tables, and there are none in the corpus {data.corpus}"

    def prepare(self, request: TaskRequest, *, progress: bool) -> Path:
        """See `Task`; data.validation is prepared, too, by the tokenizer of the corpus."""
        data = request.data
        path = prepare(
            data.corpus,
            data.tokenizer,
            data.folder,
            validation_fraction=_cut(data),
            text_key=data.text_key,
            as_text=data.as_text,
            progress=progress,
        )
        if data.validation is not None:
            self.text(request, path, progress=progress)
        return path

    def text(self, request: TaskRequest, path: Path, *, progress: bool = False) -> Dataset:
        """Open the tokens at a path that `prepare` returned, with the validation split of data.validation if it is
        given. Raises UserError: see `open_dataset` and `validated_on`.
        """
        data = request.data
        if data.validation is None:
            return open_dataset(path)
        corpus = open_dataset(path, both=False)
        return validated_on(corpus, data.validation, data.folder, _reading(data), progress=progress)

    def open(self, request: TaskRequest, path: Path) -> AnyDataset:
        """See `Task`."""
        return self.text(request, path)


def _located(data: Data) -> Path | None:
    """The prepared tokens of the corpus; None: there are none yet."""
    cut, key = _cut(data), data.text_key
    return locate(data.corpus, data.tokenizer, data.folder, validation_fraction=cut, text_key=key, as_text=data.as_text)


def _reading(data: Data) -> Reading:
    return Reading(data.text_key, data.as_text)


def _cut(data: Data) -> float:
    """The share of the corpus that is its validation split."""
    return data.validation_fraction if data.validation is None else ALL_TRAIN
