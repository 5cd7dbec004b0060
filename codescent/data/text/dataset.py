"""In: a folder of token shards: ours, nanoGPT's or llm.c's. Out: the dataset, open: its splits, what is known of it.
Does not read samples (split.py does), does not write, does not import torch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, field_validator

from codescent.base.durable import sha256_of
from codescent.base.errors import UserError
from codescent.base.home import expanded
from codescent.base.sealed import digest
from codescent.data import prepared
from codescent.data.prepared import AGAIN, DESCRIPTION, SPLITS, TOKENIZER, Fields
from codescent.data.text import corpora, download
from codescent.data.text.foreign import GPT2_VOCAB_SIZE, Foreign, ShardFile, is_foreign, read_foreign
from codescent.data.text.request import FORMAT, Request, make_request
from codescent.data.text.split import Split, TextSource
from codescent.data.tokenizers import bpe
from codescent.data.tokenizers.tokenizer import Tokenizer, load
from codescent.data.verified import hashes

CHECKED_BYTES = 1 << 28  # of others up to so many bytes of tokens are checked at once; more, as they are read
Count = Annotated[int, Field(ge=0)]


class _Shard(Fields):
    file: Annotated[str, Field(pattern=r"^[^/\\]+$")]
    tokens: Count
    sha256: str


class _Corpus(Fields):
    empty_files: list[str]


class _Split(Fields):
    characters: Count
    shards: list[_Shard]


class _Tokenizer(prepared.TokenizerFields):
    sha256: str


class _Description(Fields):
    format: str
    request: dict[str, Any]
    stamp: str
    corpus: _Corpus
    forced_cuts: Count
    tokenizer: _Tokenizer
    dtype: Literal["uint16", "uint32"]
    splits: prepared.Splits[_Split]

    @field_validator("format", mode="before")
    @classmethod
    def _check_format(cls, value: object) -> object:
        if value != FORMAT:
            raise ValueError(f"{value!r}, expected {FORMAT!r}")
        return value


@dataclass(frozen=True)
class Dataset:
    """Token shards, open.

    Attributes:
        description: what is known of their making: of ours all of description.json, of others `format` and counts.
        fingerprint: changes with the tokens.
        earlier: of shards of others, the fingerprint of earlier versions: of sizes, first and last bytes.
    """

    path: Path
    vocab_size: int
    train: Split
    validation: Split
    description: dict[str, Any]
    fingerprint: str
    earlier: str | None = None

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None: shards of others came without one. Raises UserError: GPT-2's cannot be had."""
        if (self.path / TOKENIZER).exists():
            return load(self.path / TOKENIZER)
        return bpe.gpt2() if self.vocab_size == GPT2_VOCAB_SIZE else None

    def source(self, split: str, seq_len: int, num_targets: int) -> TextSource:
        """Samples that predict each next token: see `AnyDataset`."""
        return TextSource(self.train if split == "train" else self.validation, seq_len, num_targets)

    def summary(self) -> list[str]:
        """A few lines for people: its tokens, characters and shards, and what preparing left out."""
        corpus, tokenizer = self.description.get("corpus", {}), self.description["tokenizer"]
        lines = [f"{self.path}: {tokenizer.get('kind', self.description['format'])}, vocabulary of {self.vocab_size:,}"]
        for split in (self.train, self.validation):
            characters = self.description["splits"][split.name].get("characters")
            counted = f"{characters:,} characters, " if characters is not None else ""
            lines.append(f"{split.name}: {counted}{split.num_tokens:,} tokens in {len(split.files)} shards")
        if empty := corpus.get("empty_files"):
            lines.append(f"{len(empty)} empty files were left out: {', '.join(empty[:3])}{', …' * (len(empty) > 3)}")
        if forced := self.description.get("forced_cuts"):
            lines.append(f"{forced} cuts had to be made where the text has no white space: see docs/data.md, Cutting")
        return lines

    @property
    def tokenizer_text(self) -> str | None:
        """The text of the tokenizer's file; None where shards of others come without one."""
        path = self.path / TOKENIZER
        return path.read_text(encoding="utf-8") if path.exists() else None

    def verify(self) -> None:
        """Read all of it again. Raises UserError: tokens outside the vocabulary, shards whose sha256 changed."""
        problems = [split.problem() for split in (self.train, self.validation)]
        problems += prepared.changed(self.path, _hashes_of(self.train, self.validation), again=True)
        if wrong := [problem for problem in problems if problem]:
            ours = "request" in self.description
            raise UserError(*wrong, *([f"{self.path}: damaged: {AGAIN}"] if ours else []))


def token_shards(corpus: str) -> Path | None:
    """The path of a corpus, if `open_dataset` can read token shards there; None: a corpus of text."""
    path = expanded(corpus)
    is_there = corpus not in corpora.NAMES and ((path / DESCRIPTION).is_file() or is_foreign(path))
    return path if is_there else None


def open_dataset(path: Path) -> Dataset:
    """Open the token shards of a folder: ours, nanoGPT's (train.bin, val.bin) or llm.c's (*_train*.bin, *_val*.bin).

    Each shard that has changed since it was verified is read for its sha256.

    Raises:
        UserError: no shards there; all shards that are not as they were made; a token of others outside the vocabulary
            (up to 256 MiB are read whole for that, more are checked as they are read).
    """
    if (path / DESCRIPTION).is_file():
        return _open_ours(path)
    if is_foreign(path):
        return _open_foreign(read_foreign(path))
    raise UserError(f"{path}: no token shards here: neither {DESCRIPTION} nor train.bin: run codescent data")


def vocab_size_of(path: Path) -> int:
    """The vocabulary of the token shards of a folder; ours are not read for it. Raises UserError as `open_dataset`."""
    if (path / DESCRIPTION).is_file():
        return int(read_description(path)["tokenizer"]["vocab_size"])
    return open_dataset(path).vocab_size


def locate(
    corpus: str,
    tokenizer: str | None,
    root: Path,
    *,
    validation_fraction: float = 0.1,
    text_key: str = "text",
    train_bpe: int | None = None,
) -> Path | None:
    """The prepared dataset of these arguments (see `make_request`), of the text as it is now; None: there is none.

    If the text itself is gone, what was prepared from it counts. Token shards are their own dataset.
    Raises UserError: bad arguments, or a prepared dataset with a truncated shard.
    """
    if shards := token_shards(corpus):
        return shards
    return locate_request(make_request(corpus, tokenizer, validation_fraction, text_key, train_bpe), root)


def locate_request(request: Request, root: Path) -> Path | None:
    """`locate`, for a checked request."""
    found = []
    for file in root.glob(f"[!.]*/{DESCRIPTION}"):
        description = prepared.noted(file.parent)  # empty where it is broken: preparing that dataset says so
        if (description.get("format"), description.get("request")) == (FORMAT, request.key):
            found.append((file.stat().st_mtime_ns, file.parent, description))
    if found and corpora.is_present(request.corpus):
        known = request.corpus == "shakespeare"  # pinned: no need to look at the file
        stamp = download.SHAKESPEARE.sha256 if known else corpora.resolve(request.corpus).stamp
        found = [entry for entry in found if entry[2].get("stamp") == stamp]
    if not found:
        return None
    _, folder, _ = max(found, key=lambda entry: entry[:2])
    check_shards(folder, read_description(folder))
    return folder


def read_description(folder: Path) -> dict[str, Any]:
    """description.json of a folder of ours. Raises UserError: all that is wrong with it, or another tokenizer."""
    description = prepared.described(folder, _Description, "token shards")
    tokenizer = folder / TOKENIZER
    if not tokenizer.is_file():
        raise UserError(f"{tokenizer}: missing: {AGAIN}")
    if sha256_of(tokenizer) != description["tokenizer"]["sha256"]:
        raise UserError(f"{tokenizer}: changed: no longer the tokenizer that made these tokens: {AGAIN}")
    return description


def check_shards(folder: Path, description: dict[str, Any]) -> dict[str, tuple[ShardFile, ...]]:
    """The shards of each split. Raises UserError: all that are missing or do not have the length that was written."""
    dtype = np.dtype(description["dtype"]).newbyteorder("<")
    shards = {
        split: tuple(
            ShardFile(folder / shard["file"], 0, shard["tokens"], dtype, shard["sha256"])
            for shard in description["splits"][split]["shards"]
        )
        for split in SPLITS
    }
    files = (file for split in SPLITS for file in shards[split])
    prepared.refuse_damaged(
        folder, prepared.resized(folder, {file.path.name: file.num_tokens * dtype.itemsize for file in files})
    )
    return shards


def _open_ours(path: Path) -> Dataset:
    description = read_description(path)
    shards = check_shards(path, description)
    vocab_size = description["tokenizer"]["vocab_size"]
    train, validation = (Split(name, files, vocab_size) for name, files in shards.items())
    prepared.refuse_damaged(path, prepared.changed(path, _hashes_of(train, validation)))
    known = " ".join(file.sha256 for files in shards.values() for file in files)
    fingerprint = hashlib.sha256(known.encode()).hexdigest()
    return Dataset(path, vocab_size, train, validation, description, fingerprint)


def _hashes_of(*splits: Split) -> dict[str, str]:
    return {file.path.name: file.sha256 for split in splits for file in split.files}


def _open_foreign(shards: Foreign) -> Dataset:
    """Nobody knows what the sha256 of these should be: a run notes those that it began with, by the fingerprint."""
    names = [file.path.name for file in (*shards.train, *shards.validation)]
    found, problems = hashes(shards.folder, dict.fromkeys(names))
    if problems:
        raise UserError(*problems.values())
    of_train, of_validation = (
        tuple(replace(file, sha256=found[file.path.name]) for file in files)
        for files in (shards.train, shards.validation)
    )
    files = (*of_train, *of_validation)
    vocab_size = shards.vocab_size
    if (shards.folder / TOKENIZER).exists():
        vocab_size = load(shards.folder / TOKENIZER).vocab_size
    if vocab_size is None:
        widest = max(np.iinfo(file.dtype).max for file in shards.train) + 1
        vocab_size = 1 + max(Split("", of_split, widest).largest() for of_split in (of_train, of_validation))
    train, validation = Split("train", of_train, vocab_size), Split("validation", of_validation, vocab_size)
    size_bytes = sum(file.num_tokens * file.dtype.itemsize for file in files)
    if size_bytes <= CHECKED_BYTES and (outside := list(filter(None, (train.problem(), validation.problem())))):
        raise UserError(*outside)
    description = {
        "format": shards.format,
        "tokenizer": {"vocab_size": vocab_size},
        "splits": {split.name: {"tokens": split.num_tokens} for split in (train, validation)},
    }
    fingerprint = digest([[file.path.name, file.num_tokens, file.sha256] for file in files])
    return Dataset(shards.folder, vocab_size, train, validation, description, fingerprint, _earlier_fingerprint(files))


def _earlier_fingerprint(files: Iterable[ShardFile]) -> str:
    found = hashlib.sha256()
    for file in files:
        found.update(f"{file.path.name} {file.num_tokens}\n".encode())
        found.update(prepared.edges_of(file.path))
    return found.hexdigest()
