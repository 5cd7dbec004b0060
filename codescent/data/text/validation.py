"""In: an open text dataset; a second corpus, given as data.validation. Out: the dataset with this corpus as its
validation split, in tokens of the dataset's own tokenizer.
Does not tokenise (prepare.py does) and does not read samples (split.py does)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from codescent.base.errors import UserError
from codescent.base.home import expanded
from codescent.base.sealed import digest
from codescent.data.prepared import DESCRIPTION, TOKENIZER
from codescent.data.text import corpora
from codescent.data.text.dataset import Dataset, locate, open_dataset, open_foreign
from codescent.data.text.foreign import GPT2_VOCAB_SIZE, is_foreign, read_foreign_validation
from codescent.data.text.prepare import prepare
from codescent.data.text.records import Reading
from codescent.data.text.request import ALL_VALIDATION
from codescent.data.text.split import Split


def validated_on(dataset: Dataset, validation: str, root: Path, reading: Reading, *, progress: bool) -> Dataset:
    """The dataset with another validation split: a whole text, or the validation split of token shards.

    Args:
        dataset: of the corpus; its tokenizer encodes the text.
        validation: the name or path of a text, or the path of token shards (a folder, or one `.bin` file).
        root: the folder of prepared datasets; the text is prepared there if it is not yet.
        reading: how the text is read.
        progress: show bars or lines on the standard error.

    Raises:
        UserError: the text or the shards cannot be used, or have tokens of another tokenizer.
    """
    other = _open(dataset, validation, root, reading, progress=progress)
    if (other.path / TOKENIZER).exists() and (dataset.path / TOKENIZER).exists():
        same = other.tokenizer_text == dataset.tokenizer_text
    else:  # foreign shards: their vocabulary is all that is known
        same = other.vocab_size <= dataset.vocab_size if _is_guessed(other) else other.vocab_size == dataset.vocab_size
    if not same:
        raise UserError(
            f"data.validation = {validation}: its tokens are of another tokenizer (vocabulary of {other.vocab_size:,}) "
            f"than those of {dataset.path} ({dataset.vocab_size:,}); give the text, or shards of the same tokenizer"
        )
    split = Split("validation", other.validation.files, dataset.vocab_size)
    splits = {**dataset.description["splits"], "validation": other.description["splits"]["validation"]}
    of_validation = {"path": str(other.path), "fingerprint": other.fingerprint, **other.description}
    return replace(
        dataset,
        validation=split,
        description={**dataset.description, "splits": splits, "validation": of_validation},
        fingerprint=digest([dataset.fingerprint, other.fingerprint]),
        earlier=None,
    )


def is_prepared(dataset: Dataset, validation: str, root: Path, reading: Reading) -> bool:
    """Whether `validated_on` has no text to prepare. Raises UserError: foreign shards without a tokenizer."""
    if validation_shards(validation) is not None:
        return True
    name = _tokenizer_of(dataset, validation)
    found = locate(
        validation,
        name,
        root,
        validation_fraction=ALL_VALIDATION,
        text_key=reading.text_key,
        as_text=reading.as_text,
    )
    return found is not None


def validation_shards(validation: str) -> Path | None:
    """The path of a data.validation that is token shards; None: it is text."""
    path = expanded(validation)
    is_there = validation not in corpora.NAMES and ((path / DESCRIPTION).is_file() or is_foreign(path, "val"))
    return path if is_there else None


def _open(dataset: Dataset, validation: str, root: Path, reading: Reading, *, progress: bool) -> Dataset:
    shards = validation_shards(validation)
    if shards is not None and shards.is_file() and (shards.parent / DESCRIPTION).is_file():
        raise UserError(f"data.validation = {validation}: one shard of a prepared folder; give {shards.parent}")
    if shards is not None:
        ours = (shards / DESCRIPTION).is_file()
        return open_dataset(shards) if ours else open_foreign(read_foreign_validation(shards))
    try:
        found = prepare(
            validation,
            _tokenizer_of(dataset, validation),
            root,
            validation_fraction=ALL_VALIDATION,
            text_key=reading.text_key,
            as_text=reading.as_text,
            progress=progress,
        )
    except UserError as error:
        raise UserError(*(f"data.validation: {problem}" for problem in error.problems)) from error
    return open_dataset(found)


def _tokenizer_of(dataset: Dataset, validation: str) -> str:
    """The tokenizer of a dataset as `prepare` takes it. Raises UserError: foreign shards without a tokenizer."""
    if (dataset.path / TOKENIZER).exists():
        return str(dataset.path / TOKENIZER)
    if dataset.vocab_size == GPT2_VOCAB_SIZE:
        return "gpt2"
    raise UserError(
        f"data.validation = {validation}: is text, and the token shards in {dataset.path} have no tokenizer to encode "
        f"it; give token shards, or put their {TOKENIZER} into that folder"
    )


def _is_guessed(dataset: Dataset) -> bool:
    """Whether the vocabulary is the largest token plus one: nanoGPT's shards with a pickle instead of a tokenizer."""
    return dataset.description["format"] == "nanoGPT" and (dataset.path / "meta.pkl").exists()
