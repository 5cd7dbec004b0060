"""In: a corpus. Out: the result of a first pass over it: bytes, characters, documents, hash, alphabet; or all errors.
Does not tokenise and does not write."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from codescent.base.counted import counted
from codescent.base.errors import UserError
from codescent.data.text import columnar
from codescent.data.text.corpora import Corpus, CorpusFile
from codescent.data.text.forms import COLUMNAR, JSON_LINES, READ
from codescent.data.text.records import Noticed, Reading
from codescent.data.text.sources import AS_TEXT, looked_at, refused

MAX_PROBLEMS = 20
NUM_CODE_POINTS = 0x110000


@dataclass(frozen=True)
class Scan:
    """Counts of a corpus.

    Attributes:
        sha256: of its single file, or of the `sha256sum` lines of its files in reading order.
        alphabet: all characters that occur, sorted; "" if not requested.
        empty: names of empty files.
        json_lines: names of the files that are read as JSON lines although their names do not say so.
        tables: the same for files that are read as tables.
        columns: names of the columns that were found to be the text, without "text".
        nulls, empty_texts: number of records that were skipped: their text is null, or has no character.
    """

    num_bytes: int
    characters: int
    documents: int
    sha256: str
    alphabet: str
    empty: tuple[str, ...]
    json_lines: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    nulls: int = 0
    empty_texts: int = 0

    def noticed(self) -> dict[str, Any]:
        """What a dataset's description records of how the files were read, as JSON data."""
        return {
            "json_lines": list(self.json_lines),
            "tables": list(self.tables),
            "columns": list(self.columns),
            "null_texts": self.nulls,
            "empty_texts": self.empty_texts,
        }

    def remarks(self) -> Iterator[str]:
        """Sentences: what a user may not expect of how the files were read."""
        for names, form in ((self.json_lines, "JSON lines"), (self.tables, "tables")):
            if names:
                more = f" and {counted(len(names) - 1, 'more file')}" if len(names) > 1 else ""
                yield f"{names[0]}{more}: read as {form}, as the content is; {AS_TEXT}"
        yield from Noticed(columns={*self.columns}, nulls=self.nulls).remarks()


def scan(
    corpus: Corpus, reading: Reading, with_alphabet: bool, num_threads: int, advance: Callable[[int], None]
) -> Scan:
    """Read a corpus once, several files at a time, in bounded memory; `advance` is called with the size of each piece.

    Raises UserError: all files of a form that is not read, before any file is read as a whole; or all problems of the
    files (the first 20); or: the corpus has no text.
    """
    if not reading.as_text and (refused := _refused(corpus, reading, num_threads)):
        raise UserError(*refused)
    stopped = threading.Event()

    def scan_file(source: CorpusFile) -> Scan | UserError:
        try:
            return _scan_file(source, reading, with_alphabet, advance, stopped)
        except UserError as error:
            return error

    files: list[Scan] = []
    alphabet: set[str] = set()
    problems: list[str] = []
    threads = ThreadPoolExecutor(num_threads)
    try:
        for outcome in threads.map(scan_file, corpus.sources):
            if isinstance(outcome, UserError):
                problems.extend(outcome.problems)
            else:
                alphabet |= set(outcome.alphabet)
                files.append(replace(outcome, alphabet=""))  # hold one alphabet in memory, not one per file
            if len(problems) >= MAX_PROBLEMS:
                problems.append("only the first problems are listed; there may be more")
                break
    finally:
        stopped.set()  # also on Ctrl-C: do not wait for files that are being read
        threads.shutdown(cancel_futures=True)
    one = corpus.is_single_file
    if not problems and not any(file.characters for file in files):
        problems = [f"{corpus.sources[0].path if one else corpus.name}: empty: there is no text to train on"]
    if problems:
        raise UserError(*problems)
    lines = "".join(f"{file.sha256}  {source.name}\n" for source, file in zip(corpus.sources, files))
    return Scan(
        num_bytes=sum(file.num_bytes for file in files),
        characters=sum(file.characters for file in files),
        documents=sum(file.documents for file in files),
        sha256=files[0].sha256 if one else hashlib.sha256(lines.encode(errors="surrogateescape")).hexdigest(),
        alphabet="".join(sorted(alphabet)),
        empty=tuple(name for file in files for name in file.empty),
        json_lines=tuple(name for file in files for name in file.json_lines),
        tables=tuple(name for file in files for name in file.tables),
        columns=tuple(sorted({name for file in files for name in file.columns})),
        nulls=sum(file.nulls for file in files),
        empty_texts=sum(file.empty_texts for file in files),
    )


def _refused(corpus: Corpus, reading: Reading, num_threads: int) -> list[str]:
    """Which files cannot be read, by their first bytes: a problem for each form, with all its files."""

    def problem(source: CorpusFile) -> tuple[str, str] | None:
        try:
            form = looked_at(source.path, reading.text_key)
            if form in COLUMNAR:
                columnar.needed(form)
        except UserError as error:  # a library is not installed
            return "; ".join(error.problems), str(source.path)
        return None if form in READ else (refused(form), str(source.path))

    files: dict[str, list[str]] = {}
    with ThreadPoolExecutor(num_threads) as threads:
        for found in filter(None, threads.map(problem, corpus.sources)):
            files.setdefault(found[0], []).append(found[1])
    return [
        f"{', '.join(paths[:MAX_PROBLEMS])}{_more(len(paths) - MAX_PROBLEMS)}: {why}" for why, paths in files.items()
    ]


def _more(number: int) -> str:
    return f" and {number} more" if number > 0 else ""


def _scan_file(
    source: CorpusFile, reading: Reading, with_alphabet: bool, advance: Callable[[int], None], stopped: threading.Event
) -> Scan:
    digest = hashlib.sha256()
    num_bytes = characters = documents = 0
    seen = np.zeros(NUM_CODE_POINTS if with_alphabet else 0, np.bool_)

    def watch(data: memoryview) -> None:
        nonlocal num_bytes
        if stopped.is_set():
            raise UserError("stopped")
        digest.update(data)
        num_bytes += len(data)
        advance(len(data))

    noticed = Noticed()
    for text, ends_document in source.blocks(replace(reading, noticed=noticed), watch):
        characters += len(text)
        documents += ends_document
        if with_alphabet:
            seen[np.frombuffer(text.encode("utf-32-le"), "<u4")] = True
    alphabet = "".join(map(chr, np.flatnonzero(seen).tolist()))
    named = (source.name,)
    return Scan(
        num_bytes,
        characters,
        documents,
        digest.hexdigest(),
        alphabet,
        empty=() if characters else named,
        json_lines=named if JSON_LINES in noticed.forms else (),
        tables=named if noticed.forms - {JSON_LINES} else (),
        columns=tuple(sorted(noticed.columns)),
        nulls=noticed.nulls,
        empty_texts=noticed.empty,
    )
