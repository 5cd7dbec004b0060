"""In: a config as a path, a name or a dict, and sections with other values. Out: the arguments of a command for it.
Does not read or check a config (config/load.py does)."""

from __future__ import annotations

import os
import re
from argparse import Namespace
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import tomli_w

from codescent.base.durable import replace_file
from codescent.base.errors import UserError
from codescent.base.home import expanded
from codescent.base.messages import given_level
from codescent.base.temporary_folder import temporary_folder
from codescent.config.load import COMMAND_LINE, shipped
from codescent.config.sections import SECTIONS
from codescent.config.unknown_key import unknown_key, unknown_section
from codescent.config.unseen_file import named
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

    Raises UserError: a section or a value has no form that a config has; the environment has a level of messages that
    is none; or what the block raises.
    """
    given_level()
    if not (config is None or isinstance(config, str | os.PathLike | Mapping)):
        raise UserError(f"config: given {config!r}; must be a name, a path, or a dict of sections")
    words = override_words(overrides)
    arguments = parse([verb, DEFAULT_JOB])
    del arguments.verb, arguments.log_level
    arguments.overrides = words
    if not isinstance(config, Mapping):
        arguments.config = DEFAULT_JOB if config is None else os.fspath(config)
        with named_as_keywords():
            yield arguments
        return
    text = _toml(config)
    with temporary_folder("codescent-config-") as folder:
        file = folder / FILE
        replace_file(file, text)
        arguments.config = str(file)
        with named_as_keywords(), named(file, DICT):
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
            if not str(key).isidentifier():  # a word of a command line would end in it
                problems.append(f"{KEYWORDS}: {section}.{key}: {unknown_key(section, str(key))}")
                continue
            try:
                words.append(f"{section}.{key}={toml_value(_plain(value))}")
            except _NO_TOML:
                problems.append(f"{KEYWORDS}: {section}.{key}: given {value!r}; {_WANTED}")
    if problems:
        raise UserError(*problems)
    return words


_NO_TOML = (TypeError, UnicodeEncodeError, RecursionError)
"""Errors of a value that TOML does not have: an object, half a character, a list that contains itself."""
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
    if not (base is None or isinstance(base, str | os.PathLike)):
        problems.append(f"{DICT}: base: given {base!r}; must be the name of a shipped config, or a path")
    if problems:
        raise UserError(*problems)
    table: dict[str, Any] = {} if base is None else {"base": _base(os.fspath(base))}
    for name, keys in sections.items():
        table[name] = {}
        for key, value in keys.items():
            try:
                given = _plain(value)
                tomli_w.dumps({str(key): "" if given is None else given}).encode()
            except _NO_TOML:
                problems.append(f"{DICT}: {name}.{key}: given {value!r}; {_WANTED}")
                continue
            if given is not None:
                table[name][str(key)] = given
    if problems:
        raise UserError(*problems)
    return tomli_w.dumps(table)


def _base(base: str) -> str:
    """A base as the dict's file names it. That file is in a folder of its own, and a base is looked for beside it."""
    is_shipped = base == Path(base).name and Path(base).stem in shipped() and not Path(base).is_file()
    return base if is_shipped else str(expanded(base).absolute())


def _plain(value: Any) -> Any:
    """A value of the types that TOML has: a path as text, what numpy has as Python's, a list as a tuple."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return _plain(value.tolist()) if isinstance(value, np.generic | np.ndarray) else value


@contextmanager
def named_as_keywords(options: Collection[str] = ()) -> Iterator[None]:
    """Problems that leave the block name the keywords of a call, not a command line.

    `options`: keywords of the function that are options of the command, such as "top_k".
    """
    try:
        yield
    except UserError as error:
        error.problems = tuple(as_keyword(problem, options) for problem in error.problems)
        error.args = ("\n".join(error.problems),)
        raise


def as_keyword(problem: str, options: Collection[str] = ()) -> str:
    """A sentence that names keywords; see `named_as_keywords`."""
    if problem.startswith(f"{COMMAND_LINE}: "):
        problem = f"{KEYWORDS}{problem.removeprefix(COMMAND_LINE)}"
    for option in options:
        problem = re.sub(rf"(?<!\S)--{option.replace('_', '-')}\b", option, problem)
    return problem
