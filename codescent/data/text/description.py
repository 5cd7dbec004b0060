"""In: description.json of a prepared dataset. Out: what it says, every field that is read later checked for its type.
Does not look at the shards (dataset.py does) and does not write (prepare.py does)."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from codescent.base.errors import UserError
from codescent.data.described import AGAIN, described
from codescent.data.text.request import DESCRIPTION, FORMAT, TOKENIZER

Count = Annotated[int, Field(ge=0)]


class _Part(BaseModel):
    model_config = ConfigDict(strict=True)  # other fields are there for people


class _Shard(_Part):
    file: Annotated[str, Field(pattern=r"^[^/\\]+$")]
    tokens: Count
    sha256: str


class _Corpus(_Part):
    empty_files: list[str]


class _Split(_Part):
    characters: Count
    shards: list[_Shard]


class _Splits(_Part):
    train: _Split
    validation: _Split


class _Tokenizer(_Part):
    kind: str
    vocab_size: Annotated[int, Field(ge=1)]
    sha256: str


def _check_format(value: object) -> object:
    if value != FORMAT:
        raise ValueError(f"{value!r}, expected {FORMAT!r}")
    return value


class _Description(_Part):
    format: Annotated[str, BeforeValidator(_check_format)]
    request: dict[str, Any]
    stamp: str
    corpus: _Corpus
    forced_cuts: Count
    tokenizer: _Tokenizer
    dtype: Literal["uint16", "uint32"]
    splits: _Splits


def read_description(folder: Path) -> dict[str, Any]:
    """What a folder of ours says of itself.

    Raises:
        UserError: it is damaged, with every field that is wrong, of another format, or beside another tokenizer.
    """
    description = described(folder, _Description, "token shards")
    tokenizer = folder / TOKENIZER
    if not tokenizer.is_file():
        raise UserError(f"{tokenizer}: missing: {AGAIN}")
    if hashlib.sha256(tokenizer.read_bytes()).hexdigest() != description["tokenizer"]["sha256"]:
        raise UserError(f"{tokenizer}: changed: no longer the tokenizer that made these tokens: {AGAIN}")
    return description


def description_of(folder: Path, key: dict[str, Any]) -> dict[str, Any] | None:
    """The raw description of a folder that was prepared for the request `key`; None of any other, or a broken one."""
    try:
        description = json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError):
        return None  # a broken neighbour; if it is the one in question, preparing it says so
    if not isinstance(description, dict) or (description.get("format"), description.get("request")) != (FORMAT, key):
        return None
    return description
