"""In: a corpus, a tokenizer, the folder of datasets. Out: a folder of token shards, encoded in parallel.
Does not hold the corpus in memory, and does not leave an unfinished dataset under its final name."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, fields
from itertools import islice
from pathlib import Path
from typing import Any

from codescent.base import writing
from codescent.base.cores import available_cores, most_processes
from codescent.base.durable import sha256_of
from codescent.base.errors import UserError
from codescent.base.output import warn
from codescent.base.published import commit
from codescent.base.sealed import read_sealed, write_sealed
from codescent.data.prepared import DESCRIPTION, JOURNAL, TOKENIZER, claimed
from codescent.data.progress import stage
from codescent.data.text import corpora
from codescent.data.text.chunks import cut_chunks, split_point
from codescent.data.text.corpora import Corpus
from codescent.data.text.dataset import check_shards, locate_request, read_description, token_shards
from codescent.data.text.pool import Encoded, encode_chunks
from codescent.data.text.records import DocumentPiece, Reading
from codescent.data.text.request import (
    ALL_TRAIN,
    ALL_VALIDATION,
    FORMAT,
    Request,
    make_request,
    remark_on,
    tokenizer_of,
)
from codescent.data.text.scan import Scan, scan
from codescent.data.text.shards import ShardWriter
from codescent.data.tokenizers import bpe
from codescent.data.tokenizers.tokenizer import NO_END, CharTokenizer, Tokenizer, document_end, load, token_dtype

SCAN = "scan.json"
"""File in the hidden folder: the result of the first pass, and later the sha256 of the tokenizer's file."""
JOURNAL_EVERY_CHUNKS = 16
BPE_TRAINING_CHARS = 1 << 27  # a BPE is trained on every n-th chunk, to read at most so many characters


def prepare(
    corpus: str,
    tokenizer: str | None,
    root: Path,
    *,
    validation_fraction: float = 0.1,
    text_key: str | None = None,
    train_bpe: int | None = None,
    as_text: bool = False,
    num_workers: int | None = None,
    progress: bool = False,
) -> Path:
    """Turn a corpus into token shards. Returns their folder, immediately if it exists already.

    Args:
        corpus: a name (corpora.NAMES), or the path of a text file, folder, glob or JSONL. A path of token shards is
            returned unchanged.
        tokenizer, validation_fraction, text_key, train_bpe, as_text: see `make_request`.
        root: the folder of datasets; created if it does not exist.
        num_workers: threads that tokenise; the shards do not depend on it. None: one per core.
        progress: show bars (on a terminal) or lines on the standard error.

    Raises:
        UserError: a problem of the arguments, the text or the disk. After a full disk or a kill the finished part is
            saved, and the next call with the same arguments continues from it.
    """
    if shards := token_shards(corpus):
        return shards
    request = make_request(corpus, tokenizer, validation_fraction, text_key, train_bpe, as_text=as_text)
    if num_workers is not None and num_workers < 1:
        raise UserError(f"workers: {num_workers} is not a number of threads: 1 or more")
    if num_workers is not None and num_workers > (most := most_processes()):
        raise UserError(f"workers: {num_workers}: the memory of this machine has room for {most} threads at most")
    if found := locate_request(request, root):
        return found
    partial = request.partial_folder(root)
    with claimed(partial) as handle:
        found = locate_request(request, root)
        return found or _Preparation(request, root, partial, handle, num_workers, progress).run()


@dataclass
class _Preparation:
    """Builds one dataset in its hidden folder, which this process has locked: its open descriptor is `handle`."""

    request: Request
    root: Path
    partial: Path
    handle: int
    num_workers: int | None
    progress: bool

    def run(self) -> Path:
        with stage("downloading", 0, self.progress and not corpora.is_present(self.request.corpus)) as advance:
            corpus = corpora.resolve(self.request.corpus, advance)
        needs_corpus = self.request.kind in ("char", "bpe")
        given = None if needs_corpus else tokenizer_of(self.request.tokenizer)  # fails before the long work
        if given and (remark := remark_on(self.request.tokenizer)):
            warn(remark)
        counted = self._scanned(corpus)
        target = self.request.folder(self.root, corpus.name, counted.sha256, counted.json_lines)
        if (target / DESCRIPTION).exists():  # of the same text, but of other file stamps: store the new stamp
            description = read_description(target)
            check_shards(target, description)
            of_corpus = {**description["corpus"], **counted.noticed()}
            write_sealed(target / DESCRIPTION, {**description, "stamp": corpus.stamp, "corpus": of_corpus})
            return target
        tokenizer, tokenizer_sha256 = self._tokenizer(corpus, counted, given)
        if counted.documents > 1 and not document_end(tokenizer):
            warn(f"{self.request.corpus}: {counted.documents:,} documents follow each other without a token: {NO_END}")
        splits, forced_cuts = self._shards(corpus, counted, tokenizer, tokenizer_sha256)
        description = {
            "format": FORMAT,
            "request": self.request.key,
            "stamp": corpus.stamp,
            "corpus": {
                "name": corpus.name,
                "files": len(corpus.sources),
                "bytes": counted.num_bytes,
                "characters": counted.characters,
                "documents": counted.documents,
                "sha256": counted.sha256,
                "empty_files": list(counted.empty),
                **counted.noticed(),
            },
            "tokenizer": {
                "kind": self.request.kind,
                "vocab_size": tokenizer.vocab_size,
                "separator": tokenizer.separator if counted.documents > 1 else None,
                "sha256": tokenizer_sha256,
            },
            "dtype": token_dtype(tokenizer.vocab_size).name,
            "forced_cuts": forced_cuts,
            "splits": splits,
        }
        write_sealed(self.partial / DESCRIPTION, description)  # the last file of a dataset
        for name in (SCAN, JOURNAL, "*.new", ".*.partial"):
            for leftover in self.partial.glob(name):
                writing.remove_file(leftover, self.root)
        commit(self.partial, target)
        return target

    def _scanned(self, corpus: Corpus) -> Scan:
        """The result of the first pass; a saved result is used if no file has changed since."""
        path = self.partial / SCAN
        saved = read_sealed(path)
        names = {item.name for item in fields(Scan)}
        known = saved is not None and {*saved["scan"]} == names  # earlier versions noticed less
        if saved and known and saved.get("stamp") == corpus.stamp:
            result: dict[str, Any] = saved["scan"]
            lists = {name: tuple(value) for name, value in result.items() if isinstance(value, list)}
            return Scan(**{**result, **lists})
        if path.exists() and not known:
            warn(f"{path}: damaged, or of an earlier version: preparing starts from the beginning")
        writing.empty_folder(self.handle)
        size_bytes = sum(source.size_bytes for source in corpus.sources)
        num_threads = self.num_workers or available_cores()
        with stage(f"reading {corpus.name}", size_bytes, self.progress) as advance:
            counted = scan(corpus, self._reading(corpus), self.request.kind == "char", num_threads, advance)
        for remark in counted.remarks():
            warn(remark)
        both = self.request.validation_fraction not in (ALL_TRAIN, ALL_VALIDATION)
        if both and not 0 < self._train_characters(counted) < counted.characters:
            raise UserError(
                f"{self.request.corpus}: {counted.characters} characters are too few to split into train and validation"
            )
        write_sealed(path, {"stamp": corpus.stamp, "scan": asdict(counted)})
        return counted

    def _tokenizer(self, corpus: Corpus, counted: Scan, given: Tokenizer | None) -> tuple[Tokenizer, str]:
        """The tokenizer and the sha256 of its file, which workers and readers of the shards load."""
        path, scanned = self.partial / TOKENIZER, read_sealed(self.partial / SCAN) or {}
        if path.exists() and "tokenizer" in scanned:  # else a kill interrupted writing it
            if sha256_of(path) == scanned["tokenizer"]:
                return given or load(path), scanned["tokenizer"]
            warn(f"{path}: changed since it was written: it is built again")
        if self.request.kind == "char":
            given = CharTokenizer(counted.alphabet, with_separator=counted.documents > 1)
        tokenizer = given or self._trained(corpus, self._train_characters(counted))
        part = path.with_suffix(".new")
        writing.remove_file(part, self.root, missing_ok=True)
        tokenizer.save(part)
        sha256 = sha256_of(part)
        writing.move(part, path, self.root)
        write_sealed(self.partial / SCAN, {**scanned, "tokenizer": sha256})
        return tokenizer, sha256

    def _trained(self, corpus: Corpus, train_characters: int) -> Tokenizer:
        every = -(-train_characters // BPE_TRAINING_CHARS)
        chunks = cut_chunks(self._blocks(corpus), train_characters, False, lambda left, right: True)

        def texts(advance: Callable[[int], None]) -> Iterator[str]:
            for number, chunk in enumerate(chunks):
                if chunk.split != "train":
                    return
                advance(chunk.characters)
                if number % every == 0:
                    yield from (text for text, _ in chunk.segments)

        with stage(f"training a BPE of {self.request.bpe_vocab_size}", train_characters, self.progress) as advance:
            return bpe.train(texts(advance), self.request.bpe_vocab_size)

    def _shards(
        self, corpus: Corpus, counted: Scan, tokenizer: Tokenizer, tokenizer_sha256: str
    ) -> tuple[dict[str, Any], int]:
        """The second pass: encode and write the chunks that the journal does not list yet."""
        separate, dtype = counted.documents > 1, token_dtype(tokenizer.vocab_size)
        writer = ShardWriter(self.partial, dtype, tokenizer_sha256)
        written = writer.splits.values()
        left = counted.characters - sum(split.num_tokens for split in written)  # context-free: a token each
        free_bytes = shutil.disk_usage(self.partial).free
        if tokenizer.context_free and left * dtype.itemsize > free_bytes:
            raise OSError(errno.ENOSPC, f"{left * dtype.itemsize} bytes more are needed, {free_bytes} are free")
        train_characters = self._train_characters(counted)
        chunks = cut_chunks(self._blocks(corpus), train_characters, tokenizer.context_free, tokenizer.cut_is_safe)
        rest = islice(chunks, writer.chunks_done, None)
        done = sum(split.characters for split in written)
        encoded = encode_chunks(rest, tokenizer, separate, self.num_workers or available_cores())
        try:
            with (
                stage(f"tokenising {corpus.name}", counted.characters, self.progress, done) as advance,
                closing(encoded),
            ):
                _write(encoded, writer, advance)
            splits = writer.finish()
        except OSError as error:
            written_bytes = sum(split.num_tokens for split in written) * dtype.itemsize
            needed_bytes = written_bytes * counted.characters // max(sum(split.characters for split in written), 1)
            error.add_note(f"{written_bytes} bytes were written of about {needed_bytes}")
            raise
        finally:
            writer.abandon()
        found = sum(split.characters for split in written), sum(split.documents for split in written)
        if found != (counted.characters, counted.documents):
            writing.remove_file(self.partial / JOURNAL, self.root, missing_ok=True)
            raise UserError(f"{self.request.corpus}: changed while it was being read: run the same command again")
        return splits, writer.forced_cuts

    def _train_characters(self, counted: Scan) -> int:
        return split_point(counted.characters, self.request.validation_fraction)

    def _blocks(self, corpus: Corpus) -> Iterator[DocumentPiece]:
        for source in corpus.sources:
            yield from source.blocks(self._reading(corpus))

    def _reading(self, corpus: Corpus) -> Reading:
        return Reading(self.request.text_key, self.request.as_text or corpus.as_text)


def _write(encoded: Iterator[Encoded], writer: ShardWriter, advance: Callable[[int], None]) -> None:
    for chunk, tokens in encoded:
        split = writer.splits[chunk.split]
        split.write(tokens)
        split.characters += chunk.characters
        split.num_bytes += chunk.num_bytes
        split.documents += chunk.documents
        writer.forced_cuts += chunk.forced_cuts
        writer.chunks_done += 1
        if writer.chunks_done % JOURNAL_EVERY_CHUNKS == 0:
            writer.journal()
        advance(chunk.characters)
