"""In: the path of a TOML file. Out: its content as a dict, and the line of each key, for error messages.
Does not know which keys are valid."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from codescent.base.errors import UserError


def read_toml(file: Path) -> tuple[dict[str, Any], dict[tuple[str, ...], int]]:
    """Read a TOML file.

    Returns:
        The content as a dict. Also the line (from 1) of each table and key, by its path, such as
        ("model", "num_layers").

    Raises:
        UserError: the file is unreadable, not UTF-8 text or not TOML. The text has line and column (from 1).
    """
    try:
        data = file.read_bytes()
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}") from error
    try:
        text = data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        read = error.object  # without the byte order mark, like error.start
        line, column = read[: error.start].count(b"\n") + 1, error.start - read.rfind(b"\n", 0, error.start)
        hint = " (it looks like UTF-16)" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else ""
        byte = f"byte 0x{read[error.start]:02x}"
        raise UserError(f"{file}:{line}:{column}: not UTF-8 text, at {byte}{hint}; save it as UTF-8") from error
    try:
        return tomllib.loads(text), _lines_of_keys(text)
    except (ValueError, RecursionError) as error:
        raise UserError(_syntax_problem(file, text, str(error))) from error


def _syntax_problem(file: Path, text: str, message: str) -> str:
    lines = text.split("\n")
    found = re.search(r" \(at (?:line (\d+), column (\d+)|end of document)\)$", message)
    if found is None:  # tomllib gives no line for deep nesting and for very long numbers
        return f"{file}: not readable as TOML: {message}"
    last = len(text.rstrip("\n").split("\n"))
    line, column = (int(found[1]), int(found[2])) if found[1] else (last, len(lines[last - 1]) + 1)
    source = lines[line - 1]
    word = re.match(r"[^\s,\]}#]*", source[column - 1 :])
    hint = ""
    if word and word[0] in ("True", "False"):
        hint = f"; write {word[0].lower()}"
    elif word and word[0] in ("None", "null"):
        hint = '; leave the key out, or write "auto"'
    elif word and message.startswith("Invalid value") and word[0][:1].isalpha():
        hint = f'; a string needs quotes: "{word[0]}"'
    return f"{file}:{line}:{column}: not TOML: {message[: found.start()]}: {source.strip()}{hint}"


def _lines_of_keys(text: str) -> dict[tuple[str, ...], int]:
    """The line of each key of a valid TOML text. tomllib does not report lines.

    Lines are joined until they parse as TOML, because strings and lists may span several lines.
    """
    lines: dict[tuple[str, ...], int] = {}
    header: tuple[str, ...] = ()
    statement, first = "", 1
    for number, line in enumerate(text.split("\n"), start=1):
        first = first if statement else number
        statement += line + "\n"
        try:
            table = tomllib.loads(statement)
        except tomllib.TOMLDecodeError:
            continue
        paths = list(_paths(table))
        if statement.lstrip().startswith("["):
            header, paths = (), [max(paths, key=len)]
        for path in paths:
            lines.setdefault(header + path, first)
        if statement.lstrip().startswith("["):
            header = paths[0]
        statement = ""
    return lines


def _paths(table: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for name, value in table.items():
        yield (name,)
        if isinstance(value, dict):
            yield from ((name, *path) for path in _paths(value))
