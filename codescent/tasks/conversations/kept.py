"""In: a Hugging Face folder, or the files in a run's folder. Out: the chat template that a run keeps, and exports.
Does not compile or render the template (chat_jinja.py and chat_template.py do)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from codescent.base.errors import UserError
from codescent.base.json_damage import json_problem
from codescent.base.reading import read_json
from codescent.tasks.conversations.chat_files import (
    JINJA,
    SPECIAL_MAP,
    TOKENIZER_CONFIG,
    TOOL_USE_JINJA,
    ChatFiles,
    text_of,
)
from codescent.tasks.task import TaskRequest

CHAT = "chat.json"
"""File in the run's folder with the chat template: its text, its special tokens, the date that it uses as today."""


def has_chat_template(folder: Path) -> bool:
    """Whether a Hugging Face folder has a chat template, or a tokenizer_config.json that is not JSON."""
    if (folder / JINJA).is_file():
        return True
    try:
        settings = read_json(folder / TOKENIZER_CONFIG)
    except OSError:
        return False
    except (ValueError, RecursionError):
        return True  # reading the template says what is wrong
    return isinstance(settings, dict) and bool(settings.get("chat_template"))


def saved_chat(request: TaskRequest) -> ChatFiles | None:
    """The chat template in the run's folder; None: there is none. Raises UserError: it is damaged."""
    if CHAT not in request.kept:
        return None
    path = request.run / CHAT
    try:
        return ChatFiles.from_json(str(path), json.loads(request.kept[CHAT]))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not a JSON object ({json_problem(error)})") from error


def file_of(chat: ChatFiles | None) -> dict[str, str]:
    """The file in a run's folder that stores a chat template: name -> text."""
    return {} if chat is None else {CHAT: json.dumps(chat.as_json(), indent=1) + "\n"}


def exported(chat: ChatFiles, texts: Mapping[str, str], eos: str | None = None) -> dict[str, str]:
    """The files of an export with the chat template and its special tokens; `eos` replaces the end-of-text token."""
    wanted = chat.special | ({} if eos is None else {"eos_token": eos})
    files = {}
    for name in (TOKENIZER_CONFIG, SPECIAL_MAP):
        settings = json.loads(texts.get(name, "{}"))
        of_file = wanted if name == TOKENIZER_CONFIG else {key: wanted[key] for key in settings if key in wanted}
        # A token may be an object with its text and properties, which are kept.
        changed = {key: text for key, text in of_file.items() if key not in settings or text_of(settings[key]) != text}
        if changed:
            files[name] = json.dumps(settings | changed, indent=2) + "\n"
    if chat.tool_use is not None:
        files[TOOL_USE_JINJA] = chat.tool_use
    return {**texts, JINJA: chat.text, **files}
