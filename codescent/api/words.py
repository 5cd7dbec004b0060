"""In: a config as a path, a name or a dict, and sections with other values. Out: the words of a command line for it.
Does not read or check a config (config/load.py does)."""

from __future__ import annotations

import os
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import tomli_w

from codescent.base.durable import replace_file
from codescent.base.errors import UserError
from codescent.config.load import COMMAND_LINE
from codescent.config.sections import SECTIONS
from codescent.config.unknown_key import unknown_section
from codescent.config.words import toml_value
from codescent.verbs.arguments import parse

ConfigGiven: TypeAlias = "str | os.PathLike[str] | Mapping[str, Any] | None"
"""The name of a shipped config, a file, the sections of a config as a dict, or None: the default job."""
DEFAULT_JOB = "default"
FILE = "config.toml"
KEYWORDS, DICT = "keywords", "config"
"""How messages name the two places of a value."""


@contextmanager
def arguments_of(verb: str, config: ConfigGiven, overrides: Mapping[str, Any]) -> Iterator[Namespace]:
    """The arguments of a command with a config and overrides. A dict is a file as long as the block takes.

    The block is to read the config: its problems name the place as a program knows it.

    Raises UserError: a section or a value has no form that a config has; or what the block raises.
    """
    words = override_words(overrides)
    arguments = parse([verb, DEFAULT_JOB])
    del arguments.verb, arguments.log_level
    arguments.overrides = words
    if not isinstance(config, Mapping):
        arguments.config = DEFAULT_JOB if config is None else os.fspath(config)
        with _named_as_given({}):
            yield arguments
        return
    text = _toml(config)
    with tempfile.TemporaryDirectory(prefix="codescent-") as folder:
        file = Path(folder) / FILE
        replace_file(file, text)
        arguments.config = str(file)
        with _named_as_given({str(file): DICT}):
            yield arguments


def override_words(overrides: Mapping[str, Any]) -> list[str]:
    """Overrides as words of a command line, such as "train.num_steps=20".

    Args:
        overrides: a dict for each section, such as {"train": {"num_steps": 20}}. None is the value "auto".

    Raises:
        UserError: every section that is no dict, and every value that TOML does not have.
    """
    problems, words = list(_wrong_sections(overrides, KEYWORDS)), list[str]()
    for section, keys in overrides.items():
        for key, value in keys.items() if isinstance(keys, Mapping) else ():
            try:
                words.append(f"{section}.{key}={toml_value(tuple(value) if isinstance(value, list) else value)}")
            except TypeError:
                problems.append(f"{KEYWORDS}: {section}.{key}: given {value!r}; {_WANTED}")
    if problems:
        raise UserError(*problems)
    return words


_WANTED = "must be a string, a number, True, False, None, a path, a list or a dict"


def _wrong_sections(sections: Mapping[str, Any], where: str) -> Iterator[str]:
    """Yield what is wrong with the form of sections."""
    for name, keys in sections.items():
        section, _, key = str(name).partition(".")
        if key:
            yield f"{where}: {name}: write {section}={{{key!r}: {keys!r}}}"
        elif name not in SECTIONS:
            yield f"{where}: {name}: {unknown_section(str(name))}"
        elif not isinstance(keys, Mapping):
            yield f"{where}: {name}: given {keys!r}; must be a dict of its keys, such as {_EXAMPLE}"


_EXAMPLE = 'train={"num_steps": 20}'


def _toml(config: Mapping[str, Any]) -> str:
    """A dict as the text of a config file. Keys with None are left out. Raises UserError: what has no form in TOML."""
    base = config.get("base")
    sections = {name: keys for name, keys in config.items() if name != "base"}
    problems = list(_wrong_sections(sections, DICT))
    if problems:
        raise UserError(*problems)
    table: dict[str, Any] = {}
    if base is not None:  # a base is looked for beside the file, which is in a folder of its own
        table["base"] = str(Path(base).absolute()) if Path(base).is_file() else str(base)
    for name, keys in sections.items():
        table[name] = {}
        for key, value in keys.items():
            given = os.fspath(value) if isinstance(value, os.PathLike) else value
            try:
                tomli_w.dumps({} if given is None else {"v": given})
            except TypeError:
                problems.append(f"{DICT}: {name}.{key}: given {value!r}; {_WANTED}")
            if given is not None:
                table[name][key] = given
    if problems:
        raise UserError(*problems)
    return tomli_w.dumps(table)


@contextmanager
def _named_as_given(files: Mapping[str, str]) -> Iterator[None]:
    """Problems that leave the block name the keywords, not a command line, and the dict, not its file."""
    try:
        yield
    except UserError as error:
        names = {COMMAND_LINE: KEYWORDS, **files}
        error.problems = tuple(_renamed(problem, names) for problem in error.problems)
        error.args = ("\n".join(error.problems),)
        raise


def _renamed(problem: str, names: Mapping[str, str]) -> str:
    """A problem whose place has another name. Lines of the dict's file are left out: nobody sees the file."""
    for before, now in names.items():
        if problem.startswith(before):
            return f"{now}: {problem[len(before) :].lstrip(':0123456789').lstrip()}"
    return problem
