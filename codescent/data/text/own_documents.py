"""In: the name of a class of the user that reads a corpus. Out: its documents, in blocks; a stamp that changes, too.
Does not tokenise (prepare.py does). It reads the documents twice or more, and refuses other ones at a later time."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

from codescent.base import own_names
from codescent.base.errors import UserError
from codescent.data.text.records import BLOCK_BYTES, DocumentPiece

KEY = "data.corpus"


class Documents:
    """The base class of corpora of your own: `data.corpus = "mymodule:MyCorpus"` (docs/own_names.md).

    An object is made without arguments. Its text becomes token shards, as that of a file does. Every call of `read`
    must give the same documents in the same order, on every machine.

    Attributes:
        files: paths of the files that it reads. The text is prepared again if one has another size or time.
    """

    files: tuple[str | Path, ...] = ()

    def read(self) -> Iterator[str]:
        """Each document of the corpus, as text. Empty ones are skipped."""
        raise NotImplementedError

    def version(self) -> str:
        """What changes if the text does, beside `files` and the class's own code: such as the version of a database."""
        return ""


def documents_of(key: str, name: str) -> Documents:
    """The object of the class of a name. Raises UserError: see `own_names.instance`."""
    return own_names.instance(key, name, Documents, needs=("read",))


class OwnTexts:
    """The documents of a class of the user.

    Args:
        name: of the class, as "package.module:NAME".

    Raises UserError: see `own_names.instance`.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.documents = documents_of(KEY, name)
        self._sha256: str | None = None

    def stamp(self) -> str:
        """Changes with the code, `version()`, and size or time of a file. Raises UserError: a file is not there."""
        lines = [str(own_names.code_of(KEY, self.name)["sha256"])]
        with own_names.in_a_sentence():  # an OSError would be taken for one of a prepared file
            lines.append(self.documents.version())
        for file in map(Path, self.documents.files):
            try:
                stat = file.stat()
            except OSError as error:
                raise UserError(f"{KEY} = {self.name}: files names {file}: {error.strerror}") from error
            lines.append(f"{file} {stat.st_size} {stat.st_mtime_ns}")
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def blocks(self, watch: Callable[[memoryview], None] | None) -> Iterator[DocumentPiece]:
        """The text of each document, in blocks. `watch` is called with the bytes of each document, and a zero byte.

        Raises:
            UserError: a document holds what UTF-8 cannot, or the documents are others than at the first time.
        """
        digest = hashlib.sha256()
        for number, text in enumerate(self._read()):
            try:
                data = text.encode() + b"\0"
            except UnicodeEncodeError as error:
                raise self._wrong(f"document {number} is not text that UTF-8 can hold ({error})") from error
            digest.update(data)
            if watch is not None:
                watch(memoryview(data))
            for begin in range(0, len(text), BLOCK_BYTES):
                yield DocumentPiece(text[begin : begin + BLOCK_BYTES], begin + BLOCK_BYTES >= len(text))
        if self._sha256 not in (None, digest.hexdigest()):
            raise self._wrong("read gives other documents than at the first time; it must give the same ones each time")
        self._sha256 = digest.hexdigest()

    def _read(self) -> Iterator[str]:
        with own_names.in_a_sentence():
            yield from self.documents.read()

    def _wrong(self, what: str) -> UserError:
        return UserError(f"{KEY} = {self.name}: {what}")
