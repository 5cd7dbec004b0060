"""In: the path of a new config. Out: the file, with comments, and the JSON Schema of configs beside it for editors.
Does not decide what is in them (config/new_file.py and config/schema.py do) and replaces no file."""

from __future__ import annotations

import os
from pathlib import Path

from codescent.base import writing
from codescent.base.command import command
from codescent.base.errors import UserError
from codescent.base.json_text import json_text
from codescent.base.output import say
from codescent.base.reading import read_bytes
from codescent.config.new_file import new_file
from codescent.config.schema import config_schema

SCHEMA = "codescent.schema.json"
"""Name of the schema beside a new config. All configs of a folder use one."""


def write_new(file: Path) -> None:
    """Write a config to start from, and the schema beside it if there is none; print what comes next.

    Raises UserError: the file exists, its name cannot be that of a run, or it cannot be written.
    """
    if os.path.lexists(file):
        raise UserError(f"--new {file}: it exists, and is kept; give another name")
    if not file.parent.is_dir():
        raise UserError(f"--new {file}: there is no folder {file.parent}")
    name = file.name.removesuffix(".toml")
    try:
        text = new_file(name, f"./{SCHEMA}")
    except UserError as error:
        problems = (problem.removeprefix("command line: ") for problem in error.problems)
        raise UserError(
            *(f"--new {file}: its run would be called {name!r}: {problem}" for problem in problems)
        ) from error
    schema, of_version = file.with_name(SCHEMA), f"{json_text(config_schema())}\n"
    _write(file, text)
    train, plan = (command(verb, str(file)) for verb in ("train", "plan"))
    said = [f"{file}: a config to start from; `{plan}` says what it costs, `{train}` trains it"]
    if not os.path.lexists(schema):
        try:
            _write(schema, of_version)
        except UserError:
            writing.remove_file(file)
            raise
        said.append(f"{schema}: its JSON Schema, which editors read (the line #:schema)")
    elif not _holds(schema, of_version):
        said.append(f"{schema}: exists, and is kept; `codescent config --schema` prints the one of this version")
    say(said)


def _holds(file: Path, text: str) -> bool:
    """Whether a file is there that can be read, and holds this text."""
    try:
        return read_bytes(file) == text.encode()
    except OSError:
        return False


def _write(file: Path, text: str) -> None:
    """Create a file. One that could not be written whole is deleted. Raises UserError: it exists, or why not."""
    try:
        with writing.open_new(file, within=file.parent) as stream:
            try:
                writing.write_all(stream, text.encode())
            except OSError:
                writing.remove_file(file)
                raise
    except OSError as error:
        raise UserError(f"--new {file}: cannot be written: {error.strerror}") from error
