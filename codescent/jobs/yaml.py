"""In: a text. Out: the same text as a scalar of YAML, on one line, in which Kubernetes replaces nothing.
Does not write documents (kubernetes.py does)."""

from __future__ import annotations

import re

REPLACED = re.compile(r"\$(?=[$(])")
"""Kubernetes reads $(NAME) as a variable of the container, and $$ as one dollar sign."""


def quoted(text: str) -> str:
    """The text in double quotes. A character that does not print is written by its number."""
    return f'"{"".join(map(_character, text))}"'


def literal(text: str) -> str:
    """A text whose words Kubernetes takes as they are."""
    return REPLACED.sub("$$", text)


def _character(one: str) -> str:
    if one in '"\\':
        return f"\\{one}"
    if one.isprintable():
        return one
    number = ord(one)
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"
