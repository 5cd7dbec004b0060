"""In: the path of a tokenizer's JSON file. Out: the tokenizer as `AutoTokenizer` of its folder reads it: what begins
and ends a text, and the token that ends a document.
Does not apply a tokenizer. Files that codescent wrote say this themselves: they are read as they were written."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from codescent.base.durable import sha256_of
from codescent.base.errors import UserError
from codescent.base.sealed import digest
from codescent.data.prepared import DESCRIPTION
from codescent.data.tokenizers import wordpiece
from codescent.data.tokenizers.bpe import LibraryTokenizer
from codescent.data.tokenizers.classes import DECIDING, class_of_model
from codescent.data.tokenizers.rebuilt import ALONE, ALONE_ELSEWHERE, CLASSES, Rebuilt, rebuilt
from codescent.data.tokenizers.tokenizer import Tokenizer, fields_of, load
from codescent.data.tokenizers.wordpiece import WordPiece, is_wordpiece

FILE, SETTINGS, OLDER, ADDED = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
MODEL, GENERATION = "config.json", "generation_config.json"
RUN_CONFIG = "config.toml"
BARE = "bare:"
"""`bare:FILE` is the file alone, without what begins and ends texts: as earlier versions read it."""
FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")
ENDS = ("add_bos_token", "add_eos_token")
SAVE_AGAIN = "load the folder in transformers and save it again"


def read(name: str | Path) -> Tokenizer:
    """Read a tokenizer's file, and beside a tokenizer.json the files of its folder. Raises UserError: every problem."""
    text = str(name)
    if text.startswith(BARE):
        return load(Path(text.removeprefix(BARE)))
    path = Path(name)
    return load(path) if _is_ours(path) else _read(path, _hashes(path))[0]


def identity(name: str | Path) -> str:
    """What decides the ids, for a dataset's key: the sha256 of the file, and what `read` adds to the file's own tokens.
    Raises OSError: the file cannot be read; UserError: it is no tokenizer."""
    text = str(name)
    path = Path(text.removeprefix(BARE))
    plain = f"file:{sha256_of(path)}"
    tokenizer = read(name)
    if not isinstance(tokenizer, LibraryTokenizer) or not tokenizer.is_recorded or _is_ours(path):
        return plain
    added: list[Any] = [tokenizer.opening, tokenizer.closing, tokenizer.separator]
    made = None if text.startswith(BARE) else _read(path, _hashes(path))[1]
    return f"{plain}:{digest(added if made is None else [*added, made.decides])[:16]}"


def remark(name: str | Path) -> str | None:
    """What is to be said when the tokenizer is read for the first time; None: nothing. Raises UserError: as `read`."""
    path = Path(name)
    if str(name).startswith(BARE) or _is_ours(path) or not path.is_file():
        return None
    made = _read(path, _hashes(path))[1]
    return None if made is None or made.remark is None else f"{path}: {made.remark}"


def _is_ours(path: Path) -> bool:
    """Whether the file is in a run's folder or in prepared data."""
    return (path.parent / DESCRIPTION).is_file() or (path.parent / RUN_CONFIG).is_file()


def _hashes(path: Path) -> tuple[str, ...]:
    """What `_read` depends on, so that a file that has changed is read again."""
    files = [path, *(path.parent / name for name in (SETTINGS, OLDER, ADDED, MODEL, GENERATION))]
    return tuple(sha256_of(file) if file.is_file() else "" for file in files)


@lru_cache(maxsize=4)
def _read(path: Path, hashes: tuple[str, ...]) -> tuple[Tokenizer, Rebuilt | None]:
    """A tokenizer, and what its class makes anew of it."""
    text, fields = fields_of(path)
    if not isinstance(fields, dict):
        raise UserError(f"{path}: not a tokenizer: not a JSON object")
    if "codescent_tokenizer" in fields or is_wordpiece(fields):  # a task adds BERT's [CLS] and [SEP]
        return load(path), None
    tokenizer = LibraryTokenizer.from_json(text, str(path), obeys=True)
    if path.name != FILE:
        return tokenizer, None
    folder = path.parent
    model, settings, named = _object(folder / MODEL).get("model_type"), named_tokens(folder), class_of(folder)
    if settings.get("auto_map"):  # code of the folder's own is not run: then the model decides nothing
        model = None if named else model
    alone = ALONE_ELSEWHERE if isinstance(model, str) and model in DECIDING else ALONE
    try:
        made = rebuilt(text, class_of_model(named, model), settings, alone, named=bool(named))
    except UserError as error:
        raise UserError(*(f"{path}: {problem}" for problem in error.problems)) from error
    if wrong := list(_contradictions(fields, folder, anew=class_of_model(named, model) in CLASSES)):
        raise UserError(*(f"{folder}: {problem}; {SAVE_AGAIN}, then all files agree" for problem in wrong))
    if made is not None:
        tokenizer = LibraryTokenizer.from_json(made.text, str(path), obeys=True, recorded=True)
    return in_folder(tokenizer, folder), made


def in_folder(tokenizer: LibraryTokenizer, folder: Path) -> LibraryTokenizer:
    """The tokenizer with the end of a document that the folder names.

    As in transformers, tokenizer_config.json or special_tokens_map.json names it. Otherwise config.json and
    generation_config.json may give its id. Otherwise one of SEPARATORS is used.

    Raises:
        UserError: the files name tokens that the tokenizer does not have.
    """
    if isinstance(tokenizer, WordPiece):
        return tokenizer
    settings, named = _object(folder / SETTINGS), named_tokens(folder)
    vocabulary = tokenizer.vocabulary
    end = _text(named.get("eos_token"))
    lacking = dict.fromkeys(
        token for token in (*_added(settings, named, folder), end) if token not in (None, *vocabulary)
    )
    if lacking:
        shown = ", ".join(json.dumps(token, ensure_ascii=False) for token in list(lacking)[:5])
        raise UserError(
            f"{folder}: {shown}{', …' * (len(lacking) > 5)}: named beside the vocabulary, which has no such token; "
            f"transformers would add it with a new id: {SAVE_AGAIN}, then all files agree"
        )
    if end is not None:
        return tokenizer.ended_by(vocabulary[end])
    for name in (MODEL, GENERATION):
        value = _object(folder / name).get("eos_token_id")
        number = next(iter(value), None) if isinstance(value, list) else value
        if isinstance(number, int) and number in vocabulary.values():
            return tokenizer.ended_by(number)
    return tokenizer


def _contradictions(fields: Mapping[str, Any], folder: Path, *, anew: bool) -> Iterator[str]:
    """What the files beside a tokenizer.json say otherwise than its `fields`. `anew`: its class adds tokens anew."""
    added = {int(token["id"]): token for token in fields.get("added_tokens") or ()}
    decoder = _object(folder / SETTINGS).get("added_tokens_decoder")
    beside = {int(key): token for key, token in decoder.items() if key.isdecimal()} if isinstance(decoder, dict) else {}
    for number, token in beside.items():
        own = added.get(number, {})
        flags = [flag for flag in FLAGS if isinstance(token, dict) and flag in token and flag in own]
        if differ := [flag for flag in flags if bool(token[flag]) != bool(own[flag])]:
            yield f"{json.dumps(own['content'])} has another {differ[0]} in {SETTINGS} than in {FILE}"
    if anew and isinstance(decoder, dict) and (lacking := [added[number] for number in added if number not in beside]):
        yield f"{json.dumps(lacking[0]['content'])} is in {FILE}, and not in added_tokens_decoder of {SETTINGS}"
    model = fields["model"]["vocab"]
    known = {pair[0] for pair in model} if isinstance(model, list) else set(model)
    new = [number for number, token in added.items() if token["content"] not in known]
    if anew and new != list(range(len(known), len(known) + len(new))):
        yield f"the ids of its added tokens have gaps, or another order: {', '.join(map(str, new[:5]))}"
    for key in ENDS:
        if key in _object(folder / OLDER):
            yield f"{key} is in {OLDER}, and decides nothing in {FILE}"


def named_tokens(folder: Path) -> dict[str, Any]:
    """The settings of a tokenizer's folder, with the tokens that its files name, as transformers reads them."""
    settings = _object(folder / SETTINGS)
    return settings if "added_tokens_decoder" in settings else settings | _object(folder / OLDER)


def class_of(folder: Path) -> str:
    """The class that a folder names for its tokenizer, without "Fast"; "": none."""
    names = (_object(folder / name).get("tokenizer_class") for name in (SETTINGS, MODEL))
    return str(next(filter(None, names), "")).removesuffix("Fast")


def read_bert(name: str, settings: Mapping[str, Any]) -> WordPiece:
    """BERT's tokenizer of a vocab.txt, with the settings of its tokenizer_config.json that change ids."""
    tokenizer = wordpiece.bert(name)
    if settings.get("strip_accents") is not None or settings.get("tokenize_chinese_chars") is False:
        tokenizer.normalise(settings.get("tokenize_chinese_chars", True), settings.get("strip_accents"))
    return tokenizer


def _added(settings: Mapping[str, Any], named: Mapping[str, Any], folder: Path) -> Iterator[str]:
    """The texts of the tokens that the folder's files add to its vocabulary."""
    decoder = settings.get("added_tokens_decoder")
    yield from filter(None, map(_text, decoder.values() if isinstance(decoder, dict) else ()))
    for name in ("additional_special_tokens", "extra_special_tokens"):
        extra = named.get(name)
        yield from filter(None, map(_text, extra if isinstance(extra, list) else ()))
    yield from _object(folder / ADDED)


def _text(token: Any) -> str | None:
    """The text of a token in a JSON file: an object with the text, or the text itself."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _object(path: Path) -> dict[str, Any]:
    """A JSON object; empty if there is no such file. Raises UserError: it is not a JSON object."""
    if not path.is_file():
        return {}
    found = fields_of(path)[1]
    if not isinstance(found, dict):
        raise UserError(f"{path}: not a JSON object")
    return found
