"""In: values that files and a command line give for keys. Out: the values as Python data; what is wrong with them.
Does not know which keys there are and reads no file (named_files.py does)."""

from __future__ import annotations

import datetime
import difflib
import math
import re
import tomllib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pydantic import ValidationError

from codescent.base.secret import secret_in
from codescent.config.keys import Section
from codescent.config.words import Key, toml_value

COMMAND_LINE = "command line"


class Given(NamedTuple):
    """A value and its origin: "FILE:LINE" or "command line"."""

    value: Any
    origin: str


class Problem(NamedTuple):
    """What is wrong, and where. `key` is empty if it is wrong with a whole file."""

    origin: str
    key: str
    text: str

    def __str__(self) -> str:
        return ": ".join(filter(None, self))


def read_override(
    override: str, key_of: Callable[[str], Key | str], example: str, problems: list[Problem]
) -> dict[str, Given]:
    """The value of an override section.key=value by its key; empty, and a problem more: it is wrong.

    Args:
        key_of: the key of a name, or what is wrong with the name.
        example: an override, for the message.
    """
    name, equals, text = (part.strip() for part in override.partition("="))
    key = key_of(name) if equals else f"not an override; write section.key=value, such as {example}"
    if isinstance(key, Key):
        return {name: Given(override_value(text, key), COMMAND_LINE)}
    problems.append(Problem(COMMAND_LINE, name if equals else override, key))
    return {}


def wrong_values(model: type[Section], values: Mapping[str, Any], key_of: Callable[[str], Key]) -> dict[str, str]:
    """What is wrong with the values of a section, by name. A key that must be given and is not is wrong, too."""
    wrong = {
        name: f"given {shown(value)}; a whole number has at most 64 bits"
        for name, value in values.items()
        if isinstance(value, int) and not -(2**63) <= value < 2**63
    }
    try:
        model.model_validate({name: value for name, value in values.items() if name not in wrong})
    except ValidationError as error:
        found = [(detail, str(detail.get("ctx", {}).get("error", ""))) for detail in error.errors(include_url=False)]
        for detail, reason in sorted(found, key=lambda one: not one[1]):  # of a union: first what has a reason
            name = str(detail["loc"][0])
            key = key_of(name)
            missing = f"is missing: {key.description}"
            text = value_problem(values[name], key, reason or None) if name in values else missing
            wrong.setdefault(name, f'given "..."; must be a {key.wanted}' if secret_in(text) else text)
    return wrong


def override_value(text: str, key: Key) -> Any:
    """The value of an override: TOML, else a string. A string key takes the text literally: shells remove quotes."""
    try:
        table = tomllib.loads(f"v = {text}")
    except (ValueError, RecursionError):
        return text
    if len(table) != 1 or (key.wanted.startswith(("string", "path")) and not isinstance(table["v"], str)):
        return text
    return table["v"]


def value_problem(value: Any, key: Key, reason: object) -> str:
    """What is wrong with a value, and what would be right. `reason`: the text of a check of keys.py; None: none."""
    if reason is not None:  # text of a check in keys.py
        return f"given {shown(value)}; {reason}"
    wanted = key.wanted if key.wanted.startswith(('"', "true", "1")) else f"a {key.wanted}"
    choices = re.findall(r'"(\w+)"', key.wanted)
    hint = ""
    if isinstance(value, str) and key.wanted.startswith('"'):
        near = difflib.get_close_matches(value.lower(), choices, n=1)
        hint = f'; did you mean "{near[0]}"?' if near else ""
    elif isinstance(value, str) and value.lower() in ("true", "false") and key.wanted.startswith("true"):
        hint = f"; write {value.lower()}, without quotes or capitals"
    elif isinstance(value, str) and re.fullmatch(r"[-+]?[0-9.]+(e[-+]?[0-9]+)?", value):
        hint = "; leave out the quotes"
    elif isinstance(value, datetime.date | datetime.time):
        hint = f'; write "{value}"'
    elif isinstance(value, float) and not math.isfinite(value):
        hint = "; must be finite"
    elif isinstance(value, float) and value.is_integer() and key.wanted.startswith("whole"):
        hint = f"; write {int(value)}"
    return f"given {shown(value)}; must be {wanted}{hint}"


def shown(value: Any) -> str:
    """A value as TOML, at most 80 characters; without what looks like a secret."""
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list):
        return "a list"
    text = toml_value(value)
    if secret_in(text):
        return '"..."'
    return text if len(text) <= 80 else f"{text[:77]}..."
