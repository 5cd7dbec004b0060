"""In: description.json of a prepared dataset. Out: what it says, every field that is read later checked for its type.
Does not look at the shards (dataset.py does) and does not write (prepare.py does)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from codescent.base.durable import sha256_of
from codescent.base.errors import UserError
from codescent.data.prepared import AGAIN, TOKENIZER, Part, Splits, TokenizerPart, described
from codescent.data.text.request import FORMAT

Count = Annotated[int, Field(ge=0)]


class _Shard(Part):
    file: Annotated[str, Field(pattern=r"^[^/\\]+$")]
    tokens: Count
    sha256: str


class _Corpus(Part):
    empty_files: list[str]


class _Split(Part):
    characters: Count
    shards: list[_Shard]


class _Tokenizer(TokenizerPart):
    sha256: str


def _check_format(value: object) -> object:
    if value != FORMAT:
        raise ValueError(f"{value!r}, expected {FORMAT!r}")
    return value


class _Description(Part):
    format: Annotated[str, BeforeValidator(_check_format)]
    request: dict[str, Any]
    stamp: str
    corpus: _Corpus
    forced_cuts: Count
    tokenizer: _Tokenizer
    dtype: Literal["uint16", "uint32"]
    splits: Splits[_Split]


def read_description(folder: Path) -> dict[str, Any]:
    """What a folder of ours says of itself.

    Raises:
        UserError: it is damaged, with every field that is wrong, of another format, or beside another tokenizer.
    """
    description = described(folder, _Description, "token shards")
    tokenizer = folder / TOKENIZER
    if not tokenizer.is_file():
        raise UserError(f"{tokenizer}: missing: {AGAIN}")
    if sha256_of(tokenizer) != description["tokenizer"]["sha256"]:
        raise UserError(f"{tokenizer}: changed: no longer the tokenizer that made these tokens: {AGAIN}")
    return description
