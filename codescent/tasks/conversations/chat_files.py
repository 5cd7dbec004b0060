"""In: a Hugging Face folder, one of its files, or a run's chat.json. Out: a chat template's text and special tokens.
Does not compile or render the template (chat_jinja.py and chat_template.py do)."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from codescent.base.errors import UserError
from codescent.base.json_damage import json_problem
from codescent.base.reading import read_text
from codescent.tasks.conversations.messages import HALF, half_a_character

JINJA = "chat_template.jinja"
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_MAP = "special_tokens_map.json"
DEFAULT, TOOL_USE = "default", "tool_use"
"""Of several templates `transformers` uses the second for a conversation with tools, else the first."""
TOOL_USE_JINJA = f"additional_chat_templates/{TOOL_USE}.jinja"
SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
MOST_BYTES, MOST_CHARACTERS = 1 << 26, 1 << 22


@dataclass(frozen=True)
class ChatFiles:
    """A chat template as files hold it.

    Attributes:
        name: the file, for messages.
        special: the special tokens (SPECIAL) that the files define: name -> text; None: the model has no such token.
        day: the date that the template uses as today, YYYY-MM-DD; None: the date on which it is compiled.
        tool_use: the text of another template, for conversations with tools; None: there is one template.
    """

    name: str
    text: str
    special: dict[str, str | None]
    day: str | None = None
    tool_use: str | None = None

    def for_tools(self) -> ChatFiles:
        """The template of a conversation with tools."""
        return self if self.tool_use is None else replace(self, text=self.tool_use, tool_use=None)

    def as_json(self) -> dict[str, Any]:
        """JSON data for files: a run's chat.json, the description of a prepared folder."""
        day = {} if self.day is None else {"day": self.day}
        tool_use = {} if self.tool_use is None else {TOOL_USE: self.tool_use}
        return {"template": self.text, "special_tokens": self.special, **day, **tool_use}

    @classmethod
    def from_json(cls, name: str, fields: Any) -> ChatFiles:
        """The inverse of `as_json`; `name` is the file's name. Raises UserError: not such data."""
        match fields:
            case {"template": str(text), "special_tokens": dict(special)}:
                return cls(name, text, special, fields.get("day"), fields.get(TOOL_USE))
        raise UserError(f'{name}: damaged: an object with "template" and "special_tokens" is needed')

    def is_same(self, other: ChatFiles) -> bool:
        """Whether both have the same template and special tokens; dates are ignored."""
        return (self.text, self.special, self.tool_use) == (other.text, other.special, other.tool_use)


def template_file(path: Path) -> Path:
    """The file with the template that `path`, a folder or a file, names. Raises UserError: the folder has none."""
    if not path.is_dir():
        return path
    found = next((name for name in (JINJA, TOKENIZER_CONFIG) if (path / name).is_file()), None)
    if found is None:
        raise UserError(f"data.chat_template: {path}: neither {JINJA} nor {TOKENIZER_CONFIG} is in this folder")
    return path / found


def read_chat_files(path: Path) -> ChatFiles:
    """Read the template of a folder, or of a file. A file is Jinja, or JSON with a template under "chat_template".

    As in `transformers`, chat_template.jinja wins over tokenizer_config.json. Special tokens are read from the files in
    the template's folder. Raises UserError: there is none, or it cannot be read.
    """
    path = template_file(path)
    text, fields = _read(path), _tokens_in(path.parent)
    beside = path.parent / TOOL_USE_JINJA
    tool_use = _read(beside) if path.name == JINJA and beside.is_file() else None
    if path.suffix == ".json":
        own = _fields(path, text)
        text, tool_use = _templates(path, own.get("chat_template"))
        fields = fields if path.name == TOKENIZER_CONFIG else fields | own
    for one in (text, tool_use):
        if one is not None and not one.strip():
            raise UserError(f"data.chat_template: {path}: empty: a Jinja template is needed")
        if one is not None and len(one) > MOST_CHARACTERS:
            raise UserError(f"data.chat_template: {path}: a template of {len(one):,} characters: more than 4 million")
    special = _special(fields)
    halves = [name for name, value in {"the template": [text, tool_use], **special}.items() if half_a_character(value)]
    if halves:
        raise UserError(f"data.chat_template: {path}: {', '.join(halves)}: {HALF}")
    return ChatFiles(str(path), text, special, tool_use=tool_use)


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > MOST_BYTES:
            raise UserError(f"data.chat_template: {path}: larger than 64 MiB: not a file with a chat template")
        return read_text(path, MOST_BYTES)
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
        raise UserError(f"data.chat_template: {path}: not JSON: {json_problem(error)}") from error
    if not isinstance(config, dict):
        raise UserError(f"data.chat_template: {path}: a JSON object is needed, found {type(config).__name__}")
    return config


def _templates(path: Path, value: Any) -> tuple[str, str | None]:
    """The template under "chat_template": a text, or the default one of a list of names and texts. And the template of
    this list for conversations with tools, if it has one.
    """
    tool_use = None
    if isinstance(value, list):
        named = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
        value, other = named.get(DEFAULT), named.get(TOOL_USE)
        tool_use = other if isinstance(other, str) else None
        if not isinstance(value, str):
            names = ", ".join(map(str, named)) or "none"
            raise UserError(
                f'data.chat_template: {path}: none of its chat templates is called "{DEFAULT}" (their names: {names}); '
                "write the wanted one into a file of its own"
            )
    if not isinstance(value, str) or not value.strip():
        raise UserError(f'data.chat_template: {path}: no template under "chat_template"')
    return value, tool_use


def _tokens_in(folder: Path) -> dict[str, Any]:
    """The special tokens in a folder's files. Like `transformers`: special_tokens_map.json wins over older configs."""
    config, older = (
        _fields(path, _read(path)) if path.is_file() else {}
        for path in (folder / TOKENIZER_CONFIG, folder / SPECIAL_MAP)
    )
    return config if "added_tokens_decoder" in config else config | older


def _special(fields: dict[str, Any]) -> dict[str, str | None]:
    """Special tokens by name. A value in `fields` is a text, an object with the text, or None (no such token)."""
    values = {name: fields[name] for name in SPECIAL if name in fields}
    texts = {name: text_of(value) for name, value in values.items()}
    return {name: text for name, text in texts.items() if text is None or isinstance(text, str)}


def text_of(token: Any) -> Any:
    """The text of a special token in a JSON file, which is an object with the text, or the text itself."""
    return token.get("content") if isinstance(token, dict) else token
