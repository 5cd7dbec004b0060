"""In: a corpus, and the settings that decide its samples. Out: base classes for tasks that store their samples in a
folder; corpus and settings give the folder's name, by which the samples are found again.
Does not know what a sample is: the subclasses do. Does not lock or hash folders (data/prepared.py does)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from codescent.base.errors import UserError
from codescent.base.home import expanded
from codescent.base.output import warn
from codescent.base.reading import read_text
from codescent.base.sealed import digest
from codescent.data import prepared as folders
from codescent.data.file_array import FileArray, open_npy
from codescent.data.samples import Source
from codescent.data.text.request import KINDS, file_of
from codescent.data.tokenizers import beside, wordpiece
from codescent.tasks.task import Task, TaskRequest

if TYPE_CHECKING:
    from codescent.config.sections import Data


@dataclass(frozen=True)
class FolderDataset:
    """An open prepared folder of samples.

    Attributes:
        format: the value of `format` in description.json.
        read_formats: the formats that this version reads; empty: only `format`.
        form: the pydantic model of description.json.
        what: the content of the folder in words, for messages.
        arrays: the .npy files, by name without suffix.
        fingerprint: a hash that changes with any byte of the files.
    """

    format: ClassVar[str]
    read_formats: ClassVar[tuple[str, ...]] = ()
    form: ClassVar[type[folders.Description]]
    what: ClassVar[str]

    path: Path
    description: dict[str, Any]
    arrays: dict[str, FileArray]
    fingerprint: str
    earlier: None = None

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open a folder. A file that has changed since its last verification is hashed again.
        Raises UserError: there is no such folder, or every damaged file.
        """
        description = cls.read_description(path)
        files: dict[str, str] = description["files"]
        folders.refuse_damaged(path, folders.hash_problems(path, files))
        arrays = {
            name.removesuffix(".npy"): open_npy(path / name, sha256)
            for name, sha256 in files.items()
            if name.endswith(".npy")
        }
        return cls(path, description, arrays, digest(files))

    @classmethod
    def read_description(cls, path: Path) -> dict[str, Any]:
        """The description of a folder. Raises UserError: there is none, or it is damaged."""
        return folders.checked_description(path, cls.form, cls.what)

    @classmethod
    def is_at(cls, corpus: str) -> bool:
        """Whether a corpus is a prepared folder of this class: its description has a format that is read."""
        found = folders.unchecked_description(expanded(corpus)).get("format")
        return found in (cls.read_formats or (cls.format,))

    @property
    def vocab_size(self) -> int:
        """The tokenizer's vocabulary size."""
        return int(self.description["tokenizer"]["vocab_size"])

    @property
    def tokenizer_text(self) -> str:
        """The text of the tokenizer's file."""
        return read_text(self.path / folders.TOKENIZER)

    def verify(self) -> None:
        """Hash all files again and compare. Raises UserError: every damaged file."""
        folders.refuse_damaged(self.path, folders.hash_problems(self.path, self.description["files"], again=True))

    def source(self, split: str, seq_len: int, num_targets: int) -> Source:
        """See `AnyDataset`."""
        raise NotImplementedError

    def summary(self) -> list[str]:
        """What `codescent data` prints."""
        raise NotImplementedError


class FolderTask(Task):
    """A task that prepares its samples into a folder of hashed files. `dataset` is the class that opens the folder."""

    dataset: type[FolderDataset]

    def parts(self, request: TaskRequest) -> Mapping[str, Any]:
        """All that the samples depend on, by name: a JSON value, or a function that returns it or raises UserError."""
        raise NotImplementedError

    def write(self, request: TaskRequest, key: dict[str, Any], folder: Path, progress: bool) -> dict[str, Any]:
        """Write all files except description.json; return its fields. Raises UserError: the corpus cannot be used."""
        raise NotImplementedError

    def remarks_on(self, fields: Mapping[str, Any]) -> list[str]:
        """Lines about samples that were left out, to print after preparing; `fields`: the return value of `write`."""
        return []

    def refuse_prepared(self, request: TaskRequest, path: Path) -> None:
        """Raise UserError if `path`, a prepared folder given as the corpus, was prepared with other settings."""

    def prepared_with(self, description: Mapping[str, Any]) -> Mapping[str, Any]:
        """The values of keys of [data] that a prepared folder has recorded."""
        return {**description["request"], "tokenizer": description["tokenizer"]["kind"]}

    def unused(self, request: TaskRequest) -> Iterator[tuple[str, str]]:
        """See `Task`: if the corpus is a prepared folder, every key with another value than it was prepared with."""
        data = request.data
        if self.dataset.is_at(data.corpus):
            before = self.prepared_with(self.dataset.read_description(expanded(data.corpus)))
            for name in {*self.keys, *self.reads}.difference(("corpus", "documents")):
                if getattr(data, name) != before.get(name):
                    yield f"data.{name}", f"is for a corpus that is not prepared yet, and {data.corpus} is prepared"

    def more_validation(self, request: TaskRequest) -> str:
        """See `Task`; a prepared folder has its split already."""
        more = super().more_validation(request)
        return f"prepare it again ({more})" if self.dataset.is_at(request.data.corpus) else more

    def key(self, request: TaskRequest) -> dict[str, Any]:
        """The dataset's key: the values of `parts`. Raises UserError: every problem of the parts."""
        problems: list[str] = []
        key = {"format": self.dataset.format}
        for name, part in self.parts(request).items():
            try:
                key[name] = part() if callable(part) else part
            except UserError as error:
                problems += error.problems
        if problems:
            raise UserError(*problems)
        return key

    def locate(self, request: TaskRequest) -> Path | None:
        """The prepared folder; None: it does not exist. Raises UserError: every problem of the config or the folder."""
        path = self._prepared_corpus(request) or _folder(request, self.key(request))
        return folders.existing(path, self.dataset.open)

    def prepare(self, request: TaskRequest, *, progress: bool) -> Path:
        """See `Task`. An error leaves no unfinished folder."""
        if path := self._prepared_corpus(request):
            return path
        key = self.key(request)
        target = _folder(request, key)

        def make(folder: Path) -> None:
            fields = self.write(request, key, folder, progress)
            files = sorted(path.name for path in folder.iterdir())
            folders.describe(folder, {"format": self.dataset.format, "request": key, **fields}, files)
            for line in self.remarks_on(fields):
                warn(f"{line}; the whole list is in {target / folders.DESCRIPTION}")

        return folders.prepared(target, make, self.dataset.open)

    def made_for(self, data: Data) -> bool:
        """See `Task`: true if the corpus is a folder that this task prepared."""
        return self.dataset.is_at(data.corpus)

    def vocab_size(self, request: TaskRequest) -> int | None:
        """See `Task`; read from the prepared folder if it exists."""
        found = self.locate(request)
        if found is None:
            return super().vocab_size(request)
        return int(self.dataset.read_description(found)["tokenizer"]["vocab_size"])

    def open(self, request: TaskRequest, path: Path) -> FolderDataset:
        """See `Task`."""
        return self.dataset.open(path)

    def open_corpus(self, corpus: str, validation_fraction: float) -> FolderDataset | None:
        """See `Task`."""
        return self.dataset.open(expanded(corpus)) if self.dataset.is_at(corpus) else None

    def _prepared_corpus(self, request: TaskRequest) -> Path | None:
        """The path of the corpus if it is a folder that this task prepared, else None."""
        if not self.dataset.is_at(request.data.corpus):
            return None
        path = expanded(request.data.corpus)
        if request.data.validation is not None:
            raise UserError(
                f"data.validation = {request.data.validation}: {path} was prepared with its own validation split; "
                "leave data.validation out, or give the file that this folder was prepared from as data.corpus"
            )
        self.refuse_prepared(request, path)
        return path


def _folder(request: TaskRequest, key: dict[str, Any]) -> Path:
    return folders.folder_of(request.data.folder, key, request.data.corpus, request.data.tokenizer)


def tokenizer_identity(name: str, wanted: str) -> str:
    """How a dataset's key names a tokenizer: by its known name, or by the sha256 of the user's file.
    Raises UserError: the file cannot be read; `wanted` names the expected content.
    """
    if wordpiece.split_name(name):
        return wordpiece.identity(name)
    if name in KINDS:
        return name
    path = expanded(name.removeprefix(beside.BARE))
    folders.user_file_sha256(path, wanted)  # refuses a file that cannot be read
    return beside.identity(file_of(name))
