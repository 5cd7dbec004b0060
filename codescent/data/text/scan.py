"""In: a corpus. Out: what its first reading tells: all that is wrong with the text, its counts, hash and alphabet.
Does not tokenise and does not write."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from codescent.base.errors import UserError
from codescent.data.text.corpora import Corpus, Source
from codescent.data.text.sources import read_blocks

MAX_PROBLEMS = 20
NUM_CODE_POINTS = 0x110000


@dataclass(frozen=True)
class Scan:
    """A corpus as counted: `sha256` is that of its file, or of the `sha256sum` lines of its files in reading order.

    `alphabet` holds every character that occurs, sorted ("" where it was not asked for); `empty` names empty files.
    """

    num_bytes: int
    characters: int
    documents: int
    sha256: str
    alphabet: str
    empty: tuple[str, ...]


@dataclass(frozen=True)
class _Facts:
    num_bytes: int
    characters: int
    documents: int
    sha256: str
    points: frozenset[int]


def scan(
    corpus: Corpus,
    text_key: str,
    with_alphabet: bool,
    num_threads: int,
    advance: Callable[[int], None] = lambda _: None,
) -> Scan:
    """Read a corpus once, several files at a time, in bounded memory.

    Args:
        advance: is told of every piece of bytes read.

    Raises:
        UserError: with all bad files of the corpus (the first 20), or: there is no text at all.
    """

    stopped = threading.Event()

    def look(source: Source) -> _Facts | UserError:
        try:
            return _scan_file(source, text_key, with_alphabet, advance, stopped)
        except UserError as error:
            return error

    facts: list[_Facts] = []
    points: set[int] = set()
    problems: list[str] = []
    threads = ThreadPoolExecutor(num_threads)
    try:
        for outcome in threads.map(look, corpus.sources):
            if isinstance(outcome, UserError):
                problems.extend(outcome.problems)
            else:
                points |= outcome.points
                facts.append(replace(outcome, points=frozenset()))  # a set per file would grow with their number
            if len(problems) >= MAX_PROBLEMS:
                problems.append("and maybe more: only the first ones are told")
                break
    finally:
        stopped.set()  # on Ctrl-C too: nobody waits for files that are being read
        threads.shutdown(cancel_futures=True)
    if problems:
        raise UserError(*problems)
    return _summed(corpus, facts, points)


def _summed(corpus: Corpus, facts: list[_Facts], points: set[int]) -> Scan:
    characters = sum(fact.characters for fact in facts)
    if not characters:
        where = corpus.sources[0].path if corpus.is_single_file else corpus.name
        raise UserError(f"{where}: empty: there is no text to train on")
    lines = "".join(f"{fact.sha256}  {source.name}\n" for source, fact in zip(corpus.sources, facts))
    one = corpus.is_single_file
    return Scan(
        num_bytes=sum(fact.num_bytes for fact in facts),
        characters=characters,
        documents=sum(fact.documents for fact in facts),
        sha256=facts[0].sha256 if one else hashlib.sha256(lines.encode(errors="surrogateescape")).hexdigest(),
        alphabet="".join(map(chr, sorted(points))),
        empty=tuple(source.name for source, fact in zip(corpus.sources, facts) if not fact.characters),
    )


def _scan_file(
    source: Source, text_key: str, with_alphabet: bool, advance: Callable[[int], None], stopped: threading.Event
) -> _Facts:
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

    for text, ends_document in read_blocks(source.path, text_key, watch):
        characters += len(text)
        documents += ends_document
        if with_alphabet:
            seen[np.frombuffer(text.encode("utf-32-le"), "<u4")] = True
    return _Facts(num_bytes, characters, documents, digest.hexdigest(), frozenset(np.flatnonzero(seen).tolist()))
