"""In: a value that a file or a command line gives for a key. Out: the value as Python data; what is wrong with it.
Does not know which keys there are and reads no file (load.py and jobs/site.py do)."""

from __future__ import annotations

import datetime
import difflib
import math
import re
import tomllib
from typing import Any, NamedTuple

from codescent.config.words import Key, toml_value


class Given(NamedTuple):
    """A value and its origin: "FILE:LINE" or "command line"."""

    value: Any
    origin: str


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
    """A value as TOML, at most 80 characters."""
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list):
        return "a list"
    text = toml_value(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
