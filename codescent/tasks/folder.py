"""In: a corpus and all that its samples depend on. Out: the folder of their files: made once, hashed, and open.
Does not know what a sample is: each task and its dataset do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from codescent.base.errors import UserError
from codescent.base.home import expanded
from codescent.base.sealed import digest
from codescent.data import prepared as folders
from codescent.data.file_array import FileArray, open_npy
from codescent.data.samples import Source
from codescent.data.text.request import KINDS
from codescent.data.tokenizers import wordpiece
from codescent.tasks.task import Task, TaskRequest

if TYPE_CHECKING:
    from codescent.config.sections import Data


@dataclass(frozen=True)
class FolderDataset:
    """Samples of a prepared folder, open.

    Attributes:
        form: the model of description.json, with its `format`; `what` says in words what the folder holds.
        arrays: the .npy files, by name without suffix.
        fingerprint: changes with any byte of the files.
    """

    format: ClassVar[str]
    form: ClassVar[type[folders.Description]]
    what: ClassVar[str]

    path: Path
    description: dict[str, Any]
    arrays: dict[str, FileArray]
    fingerprint: str
    earlier: None = None

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open a folder; every file that changed since it was verified is compared with its sha256.
        Raises UserError: there is none, or every file that is damaged.
        """
        description = cls.described(path)
        files: dict[str, str] = description["files"]
        folders.refuse_damaged(path, folders.changed(path, files))
        arrays = {
            name.removesuffix(".npy"): open_npy(path / name, sha256)
            for name, sha256 in files.items()
            if name.endswith(".npy")
        }
        return cls(path, description, arrays, digest(files))

    @classmethod
    def described(cls, path: Path) -> dict[str, Any]:
        """The description of a folder. Raises UserError: there is none, or it is damaged."""
        return folders.described(path, cls.form, cls.what)

    @classmethod
    def is_at(cls, corpus: str) -> bool:
        """Whether a corpus is a folder that says that it holds such samples."""
        return folders.noted(expanded(corpus)).get("format") == cls.format

    @property
    def vocab_size(self) -> int:
        """The tokenizer's."""
        return int(self.description["tokenizer"]["vocab_size"])

    @property
    def tokenizer_text(self) -> str:
        """The text of the tokenizer's file."""
        return (self.path / folders.TOKENIZER).read_text(encoding="utf-8")

    def verify(self) -> None:
        """Compare all files with their sha256 again. Raises UserError: all that are damaged."""
        folders.refuse_damaged(self.path, folders.changed(self.path, self.description["files"], again=True))

    def source(self, split: str, seq_len: int, num_targets: int) -> Source:
        """See `AnyDataset`."""
        raise NotImplementedError

    def summary(self) -> list[str]:
        """What `codescent data` prints."""
        raise NotImplementedError


class FolderTask(Task):
    """A task whose samples are prepared into a folder of hashed files, which is opened as its `dataset`."""

    dataset: type[FolderDataset]

    def parts(self, request: TaskRequest) -> Mapping[str, Any]:
        """What the samples depend on, by name: a JSON value, or a function that returns it or raises UserError."""
        raise NotImplementedError

    def write(self, request: TaskRequest, key: dict[str, Any], folder: Path, progress: bool) -> dict[str, Any]:
        """Write all files but the description; returns its fields. Raises UserError: the corpus cannot be used."""
        raise NotImplementedError

    def refuse_prepared(self, request: TaskRequest, path: Path) -> None:
        """Raise UserError where the corpus is a prepared folder that differs from what is asked for."""

    def key(self, request: TaskRequest) -> dict[str, Any]:
        """All that the samples depend on. Raises UserError: everything that is wrong with it."""
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
        """The prepared folder, if it is there. Raises UserError: everything that is wrong with what is asked for."""
        return folders.existing(self._given(request) or _folder(request, self.key(request)), self.dataset.open)

    def prepare(self, request: TaskRequest, *, progress: bool) -> Path:
        """See `Task`; nothing half-made is left."""
        if given := self._given(request):
            return given
        key = self.key(request)

        def make(folder: Path) -> None:
            fields = self.write(request, key, folder, progress)
            files = sorted(path.name for path in folder.iterdir())
            folders.describe(folder, {"format": self.dataset.format, "request": key, **fields}, files)

        return folders.prepared(_folder(request, key), make, self.dataset.open)

    def made_for(self, data: Data) -> bool:
        """See `Task`: a prepared folder is."""
        return self.dataset.is_at(data.corpus)

    def vocab_size(self, request: TaskRequest) -> int | None:
        """See `Task`; that of the prepared folder where it is there."""
        found = self.locate(request)
        return (
            super().vocab_size(request) if found is None else self.dataset.described(found)["tokenizer"]["vocab_size"]
        )

    def open(self, request: TaskRequest, path: Path) -> FolderDataset:
        """See `Task`."""
        return self.dataset.open(path)

    def open_corpus(self, corpus: str, validation_fraction: float) -> FolderDataset | None:
        """See `Task`."""
        return self.dataset.open(expanded(corpus)) if self.dataset.is_at(corpus) else None

    def _given(self, request: TaskRequest) -> Path | None:
        """The corpus, where it is a prepared folder."""
        if not self.dataset.is_at(request.data.corpus):
            return None
        path = expanded(request.data.corpus)
        self.refuse_prepared(request, path)
        return path


def _folder(request: TaskRequest, key: dict[str, Any]) -> Path:
    return folders.folder_of(request.data.folder, key, request.data.corpus, request.data.tokenizer)


def tokenizer_identity(name: str, wanted: str) -> str:
    """A tokenizer in a key: its name where it is published, else the sha256 of the user's file.
    Raises UserError: the file cannot be read: what is `wanted`.
    """
    if wordpiece.split_name(name):
        return wordpiece.identity(name)
    return name if name in KINDS else f"file:{folders.given_sha256(expanded(name), wanted)}"
