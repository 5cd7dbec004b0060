"""In: the path of a TOML file. Out: its content as a dict, and the line of each key, for error messages.
Does not know which keys are valid. Does not show a line with a secret."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from codescent.base.errors import UserError
from codescent.base.reading import read_bytes
from codescent.base.secret import is_secret_name, secret_in

MOST_BYTES = 1 << 20
"""A larger file is no config. A part of what tomllib does takes the square of the length of a key."""
MOST_DEPTH = 64
"""Most parts of a key, such as the two of section.key."""
_MARKS = re.compile(
    r'"""(?:\\.|[^\\])*?"{3,5}|' + r"'''.*?'{3,5}" + r'|"(?:\\.|[^"\\\n])*"' + r"|'[^'\n]*'" + r"|#[^\n]*|[\[\]{}\n]",
    re.DOTALL,
)
"""Strings and comments of a TOML text, its brackets and newlines."""
KEY = re.compile(r"\s*(?:[\w.\"'-]+\.)?[\"']?([\w-]+)[\"']?\s*=")
"""A key at the begin of a line; its last part is the group."""


def read_toml(file: Path) -> tuple[dict[str, Any], dict[tuple[str, ...], int]]:
    """Read a TOML file.

    Returns:
        The content as a dict. Also the line (from 1) of each table and key, by its path, such as
        ("model", "num_layers").

    Raises:
        UserError: the file is unreadable, not UTF-8 text or not TOML. The text has line and column (from 1).
    """
    try:
        data = read_bytes(file, MOST_BYTES)
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
        return loads(text), _lines_of_keys(text)
    except (ValueError, RecursionError) as error:
        raise UserError(_syntax_problem(file, text, str(error))) from error


def loads(text: str) -> dict[str, Any]:
    """The content of a TOML text. Raises tomllib.TOMLDecodeError, also for what tomllib itself cannot hold."""
    if line := _too_deep(text):
        raise tomllib.TOMLDecodeError(f"A key of more than {MOST_DEPTH} parts (at line {line}, column 1)")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; lists in lists
        raise tomllib.TOMLDecodeError(str(error)) from error


def _syntax_problem(file: Path, text: str, message: str) -> str:
    lines = text.split("\n")
    found = re.search(r" \(at (?:line (\d+), column (\d+)|end of document)\)$", message)
    if found is None:  # tomllib gives no line for deep nesting and for very long numbers
        return f"{file}: not readable as TOML: {message}"
    last = len(text.rstrip("\n").split("\n"))
    line, column = (int(found[1]), int(found[2])) if found[1] else (last, len(lines[last - 1]) + 1)
    source = lines[line - 1]
    match = re.match(r"[^\s,\]}#]*", source[column - 1 :])
    word = match[0] if match else ""
    if _has_secret(lines[:line]):
        begin = KEY.match(source)
        source, word = f"{begin[0]} ..." if begin else "...", "..." if word[:1].isalpha() else ""
    hint = ""
    if word in ("True", "False"):
        hint = f"; write {word.lower()}"
    elif word in ("None", "null"):
        hint = '; leave the key out, or write "auto"'
    elif message.startswith("Invalid value") and (word[:1].isalpha() or word == "..."):
        hint = f'; a string needs quotes: "{word}"'
    return f"{file}:{line}:{column}: not TOML: {message[: found.start()]}: {source.strip()}{hint}"


def _has_secret(lines: Sequence[str]) -> bool:
    """Whether a password or a token is in the last line, or in the value that goes on there."""
    begins = [number for number, line in enumerate(lines) if KEY.match(line)]
    statement = lines[begins[-1] if begins else 0 :]
    words = (word for line in statement for word in re.findall(r"\w[\w-]*", line))
    return any(map(is_secret_name, words)) or any(map(secret_in, statement))


def _lines_of_keys(text: str) -> dict[tuple[str, ...], int]:
    """The line of each key of a valid TOML text. tomllib does not report lines.

    Each statement is parsed alone, once.
    """
    lines: dict[tuple[str, ...], int] = {}
    header: tuple[str, ...] = ()
    for first, statement in _statements(text):
        paths = list(_paths(tomllib.loads(statement)))
        if not paths:
            continue
        if statement.lstrip().startswith("["):
            header, paths = (), [max(paths, key=len)]
        for path in paths:
            lines.setdefault(header + path, first)
        if statement.lstrip().startswith("["):
            header = paths[0]
    return lines


def _statements(text: str) -> Iterator[tuple[int, str]]:
    """The statements of a valid TOML text, each with its first line: a newline in a string or a list ends none."""
    begin, depth, first, line = 0, 0, 1, 1
    for mark in _MARKS.finditer(text):
        found = mark[0]
        depth += (found in ("[", "{")) - (found in ("]", "}"))
        line += found.count("\n")
        if found == "\n" and depth == 0:
            yield first, text[begin : mark.end()]
            begin, first = mark.end(), line
    yield first, text[begin:]


def _too_deep(text: str) -> int:
    """The line of a key with more than MOST_DEPTH parts; 0: there is none."""
    bare = _MARKS.sub(lambda mark: "\n" * mark[0].count("\n") or mark[0] if mark[0] in "[]{}" else '""', text)
    found = re.search(rf"(?<![^\s.=,])(?:[^\s.=,]++[ \t]*\.[ \t]*){{{MOST_DEPTH}}}", bare)
    return bare.count("\n", 0, found.start()) + 1 if found else 0


def _paths(table: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for name, value in table.items():
        yield (name,)
        if isinstance(value, dict):
            yield from ((name, *path) for path in _paths(value))
