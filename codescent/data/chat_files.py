"""In: a Hugging Face folder or a file of it. Out: the text of its chat template, and its special tokens' names.
Does not compile or render the template (chat_template.py does)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from codescent.errors import UserError

JINJA = "chat_template.jinja"
TOKENIZER_CONFIG = "tokenizer_config.json"
DEFAULT = "default"  # which of several templates transformers takes
SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class ChatFiles:
    """A chat template as files hold it.

    Attributes:
        name: the file, for messages.
        text: Jinja.
        special: of SPECIAL those that tokenizer_config.json names; None: there is no such file.
    """

    name: str
    text: str
    special: dict[str, str] | None


def read_chat_files(path: Path) -> ChatFiles:
    """The template of a folder, or of a file: tokenizer_config.json, or one of Jinja with tokenizer_config.json beside.

    In a folder chat_template.jinja comes before tokenizer_config.json, as `transformers` has it.

    Raises:
        UserError: there is none, or it cannot be read.
    """
    if path.is_dir():
        found = next((name for name in (JINJA, TOKENIZER_CONFIG) if (path / name).is_file()), None)
        if found is None:
            raise UserError(f"data.chat_template: {path}: neither {JINJA} nor {TOKENIZER_CONFIG} is in this folder")
        path = path / found
    text = _read(path)
    if path.suffix == ".json":
        config = _fields(path, text)
        return ChatFiles(str(path), _template(path, config.get("chat_template")), _special(config))
    if not text.strip():
        raise UserError(f"data.chat_template: {path}: empty: a Jinja template is needed")
    beside = path.parent / TOKENIZER_CONFIG
    return ChatFiles(str(path), text, _special(_fields(beside, _read(beside))) if beside.is_file() else None)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"data.chat_template: {path}: cannot be read: {error.strerror}: give a folder with {JINJA} or "
            f"{TOKENIZER_CONFIG}, or one of these files"
        ) from error
    except UnicodeDecodeError as error:
        raise UserError(f"data.chat_template: {path}: not UTF-8 text: byte {error.start}") from error


def _fields(path: Path, text: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"data.chat_template: {path}: not JSON: {error}") from error
    if not isinstance(config, dict):
        raise UserError(f"data.chat_template: {path}: a JSON object is needed, found {type(config).__name__}")
    return config


def _template(path: Path, value: Any) -> str:
    """The template under "chat_template": a text, or the default one of a list of names and texts."""
    if isinstance(value, list):
        named = {it.get("name"): it.get("template") for it in value if isinstance(it, dict)}
        value = named.get(DEFAULT)
        if not isinstance(value, str):
            names = ", ".join(map(str, named)) or "none"
            raise UserError(
                f'data.chat_template: {path}: none of its chat templates is called "{DEFAULT}" (there is: {names}); '
                "write the wanted one into a file of its own"
            )
    if not isinstance(value, str) or not value.strip():
        raise UserError(f'data.chat_template: {path}: no template under "chat_template"')
    return value


def _special(config: dict[str, Any]) -> dict[str, str]:
    """Special tokens, each a text or an object with its text; null: there is none."""
    values = {name: config.get(name) for name in SPECIAL}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in values.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}
