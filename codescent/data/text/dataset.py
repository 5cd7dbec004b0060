"""In: a folder of token shards in the format of codescent, nanoGPT or llm.c. Out: an open dataset: splits, description.
Does not read samples (split.py does), does not write, does not import torch.

Shards in the format of nanoGPT or llm.c are called foreign."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, field_validator

from codescent.base.counted import counted
from codescent.base.durable import sha256_of
from codescent.base.errors import UserError
from codescent.base.home import expanded
from codescent.base.reading import read_text
from codescent.base.sealed import digest
from codescent.data import prepared
from codescent.data.prepared import AGAIN, DESCRIPTION, SPLITS, TOKENIZER, Fields
from codescent.data.text import corpora, download
from codescent.data.text.foreign import GPT2_VOCAB_SIZE, Foreign, ShardFile, is_foreign, read_foreign
from codescent.data.text.request import FORMAT, READ_FORMATS, Request, make_request
from codescent.data.text.split import Split, TextSource
from codescent.data.tokenizers import bpe
from codescent.data.tokenizers.tokenizer import Tokenizer, load
from codescent.data.verified import hashes

CHECKED_BYTES = 1 << 28  # foreign tokens up to this size are checked when opened; more are checked as they are read
Count = Annotated[int, Field(ge=0)]


_LEFT_OUT = {"null_texts": "without a text (null)", "empty_texts": "with an empty text"}
"""Fields of a description that count records, with what they lack."""


class _Shard(Fields):
    file: Annotated[str, Field(pattern=r"^[^/\\]+$")]
    tokens: Count
    sha256: str


class _Corpus(Fields):
    empty_files: list[str]


class _TextSplit(Fields):
    characters: Count
    bytes: Count | None = None  # format 2 had none
    shards: list[_Shard]


class _Tokenizer(prepared.TokenizerFields):
    sha256: str


class _CorpusDescription(Fields):
    format: str
    request: dict[str, Any]
    stamp: str
    corpus: _Corpus
    forced_cuts: Count
    tokenizer: _Tokenizer
    dtype: Literal["uint16", "uint32"]
    splits: prepared.Splits[_TextSplit]

    @field_validator("format", mode="before")
    @classmethod
    def _check_format(cls, value: object) -> object:
        if value not in READ_FORMATS:
            raise ValueError(f"{value!r}, expected {FORMAT!r}")
        return value


@dataclass(frozen=True)
class Dataset:
    """Open token shards.

    Attributes:
        description: the content of description.json; for foreign shards, their `format` and counts.
        fingerprint: a hash that changes with the tokens.
        earlier: for foreign shards, the fingerprint of earlier versions: a hash of sizes, first and last bytes.
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
        """The tokenizer; None: foreign shards without one. Raises UserError: GPT-2's files cannot be downloaded."""
        if (self.path / TOKENIZER).exists():
            return load(self.path / TOKENIZER)
        return bpe.gpt2() if self.vocab_size == GPT2_VOCAB_SIZE else None

    def source(self, split: str, seq_len: int, num_targets: int) -> TextSource:
        """Samples whose targets are the next tokens: see `AnyDataset`."""
        return TextSource(self.train if split == "train" else self.validation, seq_len, num_targets)

    def summary(self) -> list[str]:
        """Lines to print: tokens, characters, shards, empty files that were left out, forced cuts."""
        corpus, tokenizer = self.description.get("corpus", {}), self.description["tokenizer"]
        lines = [f"{self.path}: {tokenizer.get('kind', self.description['format'])}, vocabulary of {self.vocab_size:,}"]
        for split in (self.train, self.validation):
            characters = self.description["splits"][split.name].get("characters")
            said = f"{counted(characters, 'character')}, " if characters is not None else ""
            shards = counted(len(split.files), "shard")
            lines.append(f"{split.name}: {said}{counted(split.num_tokens, 'token')} in {shards}")
        if empty := corpus.get("empty_files"):
            lines.append(f"{len(empty)} empty files were left out: {', '.join(empty[:3])}{', …' * (len(empty) > 3)}")
        for name, form in (("json_lines", "JSON lines"), ("tables", "tables")):
            if files := corpus.get(name):
                more = ", …" * (len(files) > 3)
                lines.append(f"read as {form} by their content: {', '.join(files[:3])}{more}")
        if columns := corpus.get("columns"):
            lines.append(f"the text is the column {' or '.join(columns)}")
        if left_out := [f"{corpus[name]:,} {why}" for name, why in _LEFT_OUT.items() if corpus.get(name)]:
            lines.append(f"records that were left out: {', '.join(left_out)}")
        if forced := self.description.get("forced_cuts"):
            lines.append(
                f"{forced} cuts were forced where the text has no white space: see codescent docs data#cutting"
            )
        return lines

    @property
    def tokenizer_text(self) -> str | None:
        """The text of the tokenizer's file; None: foreign shards without one."""
        path = self.path / TOKENIZER
        return read_text(path) if path.exists() else None

    def verify(self) -> None:
        """Read all shards again. Raises UserError: tokens outside the vocabulary, shards whose sha256 has changed."""
        problems = [split.problem() for split in (self.train, self.validation)]
        of_folders: dict[Path, list[Split]] = {}  # a data.validation has a folder of its own
        for split in (self.train, self.validation):
            of_folders.setdefault(split.files[0].path.parent if split.files else self.path, []).append(split)
        damaged = [self.path] if any(problems) else []
        for folder, splits in of_folders.items():
            if found := prepared.hash_problems(folder, _hashes_of(*splits), again=True):
                problems, damaged = [*problems, *found], [*damaged, folder]
        if wrong := [problem for problem in problems if problem]:
            ours = "request" in self.description
            advice = [f"{folder}: damaged: {AGAIN}" for folder in dict.fromkeys(damaged)]
            raise UserError(*wrong, *(advice if ours else []))


def token_shards(corpus: str) -> Path | None:
    """The path of a corpus that is token shards, which `open_dataset` can read; None: the corpus is text."""
    path = expanded(corpus)
    is_there = corpus not in corpora.NAMES and ((path / DESCRIPTION).is_file() or is_foreign(path))
    return path if is_there else None


def open_dataset(path: Path, *, both: bool = True) -> Dataset:
    """Open the token shards of a folder: codescent's, nanoGPT's (train.bin, val.bin) or llm.c's (*_train*.bin,
    *_val*.bin).

    A shard that has changed since its last verification is hashed again.

    Args:
        path: of the folder.
        both: False: foreign shards need not have a validation split, and it is not opened.

    Raises:
        UserError: no shards in the folder; every shard whose content has changed; a foreign token outside the
            vocabulary (up to 256 MiB of tokens are checked now, more are checked as they are read).
    """
    if (path / DESCRIPTION).is_file():
        return _open_ours(path)
    if is_foreign(path):
        return open_foreign(read_foreign(path, both=both))
    raise UserError(f"{path}: no token shards in this folder: neither {DESCRIPTION} nor train.bin: run codescent data")


def vocab_size_of(path: Path, *, both: bool = True) -> int:
    """Vocabulary size of a folder of token shards; only foreign shards are opened. See `open_dataset`."""
    if (path / DESCRIPTION).is_file():
        return int(read_description(path)["tokenizer"]["vocab_size"])
    return open_dataset(path, both=both).vocab_size


def is_tokenizer_of(shards: Path, name: str) -> bool:
    """Whether a value of data.tokenizer names the tokenizer of token shards. The shards are not opened."""
    try:
        if (shards / DESCRIPTION).is_file():
            made = prepared.unchecked_description(shards).get("request", {}).get("tokenizer")
            return bool(make_request(str(shards), name, 0.1, "text", None).key["tokenizer"] == made)
        folder = shards if shards.is_dir() else shards.parent
        vocab_size = None if (folder / TOKENIZER).exists() else read_foreign(shards, both=False).vocab_size
        return name == "gpt2" and vocab_size == GPT2_VOCAB_SIZE
    except UserError:  # no such tokenizer, or no shards: opening them says so
        return False


def locate(
    corpus: str,
    tokenizer: str | None,
    root: Path,
    *,
    validation_fraction: float = 0.1,
    text_key: str | None = None,
    train_bpe: int | None = None,
    as_text: bool = False,
) -> Path | None:
    """Find the dataset that was prepared with these arguments (see `make_request`); None: there is none.

    It must be of the current text. If the text does not exist any more, any dataset prepared from it is accepted.
    A corpus of token shards is its own dataset: its path is returned.
    Raises UserError: bad arguments, or a prepared dataset with a truncated shard.
    """
    if shards := token_shards(corpus):
        return shards
    return locate_request(
        make_request(corpus, tokenizer, validation_fraction, text_key, train_bpe, as_text=as_text), root
    )


def locate_request(request: Request, root: Path) -> Path | None:
    """`locate`, for a checked request."""
    found = []
    for file in root.glob(f"[!.]*/{DESCRIPTION}"):
        description = prepared.unchecked_description(file.parent)  # {} if damaged: preparing it reports that
        if description.get("format") in READ_FORMATS and description.get("request") == request.key:
            found.append((file.stat().st_mtime_ns, file.parent, description))
    if found and corpora.is_present(request.corpus):
        known = request.corpus == "shakespeare"  # its sha256 is fixed: the file is not read
        stamp = download.SHAKESPEARE.sha256 if known else corpora.resolve(request.corpus).stamp
        found = [entry for entry in found if entry[2].get("stamp") == stamp]
        if not request.as_text:
            found = [entry for entry in found if _still_read_so(entry[2], request.corpus)]
    if request.text_key is not None:  # a dataset of another column, which was found, has the same key
        found = [entry for entry in found if not entry[2].get("corpus", {}).get("columns")]
    if not found:
        return None
    _, folder, _ = max(found, key=lambda entry: entry[:2])
    check_shards(folder, read_description(folder))
    return folder


def _still_read_so(description: dict[str, Any], corpus: str) -> bool:
    """Whether tokens of a corpus are those that this version would make. Without `json_lines` files were known by their
    names alone; without `columns` a file of JSON on most lines was read as text."""
    known = description.get("corpus", {})
    if "json_lines" not in known and not corpora.is_as_named(corpus):
        return False
    return "columns" in known or corpora.is_read(corpus)


def read_description(folder: Path) -> dict[str, Any]:
    """The description of codescent's shards. Raises UserError: every wrong field, or a missing or changed tokenizer."""
    description = prepared.checked_description(folder, _CorpusDescription, "token shards")
    tokenizer = folder / TOKENIZER
    if not tokenizer.is_file():
        raise UserError(f"{tokenizer}: missing: {AGAIN}")
    if sha256_of(tokenizer) != description["tokenizer"]["sha256"]:
        raise UserError(f"{tokenizer}: changed: no longer the tokenizer that encoded these tokens: {AGAIN}")
    return description


def check_shards(folder: Path, description: dict[str, Any]) -> dict[str, tuple[ShardFile, ...]]:
    """The shards of each split. Raises UserError: every shard that is missing or does not have its recorded size."""
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
        folder, prepared.size_problems(folder, {file.path.name: file.num_tokens * dtype.itemsize for file in files})
    )
    return shards


def _open_ours(path: Path) -> Dataset:
    description = read_description(path)
    shards = check_shards(path, description)
    vocab_size = description["tokenizer"]["vocab_size"]
    train, validation = (Split(name, files, vocab_size) for name, files in shards.items())
    prepared.refuse_damaged(path, prepared.hash_problems(path, _hashes_of(train, validation)))
    known = " ".join(file.sha256 for files in shards.values() for file in files)
    fingerprint = hashlib.sha256(known.encode()).hexdigest()
    return Dataset(path, vocab_size, train, validation, description, fingerprint)


def _hashes_of(*splits: Split) -> dict[str, str]:
    return {file.path.name: file.sha256 for split in splits for file in split.files}


def open_foreign(shards: Foreign) -> Dataset:
    """Open foreign shards. Their right sha256 is unknown: a run compares with the fingerprint that it started with.
    Raises UserError: see `open_dataset`.
    """
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
        widest = max(np.iinfo(file.dtype).max for file in files) + 1
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
