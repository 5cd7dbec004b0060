"""In: a config, a site, overrides. Out: the resolved config; tables of every key, its value and where that comes from.
Does not read TOML files or check values (config/ and jobs/site.py do)."""

from __future__ import annotations

import dataclasses
import sys
import tomllib
from argparse import Namespace
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich import box
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from codescent.base.console import new_console
from codescent.base.errors import UserError
from codescent.base.hub_name import HubName, is_hub_name, parse
from codescent.base.json_text import json_text
from codescent.base.output import say
from codescent.base.own_names import is_own_name
from codescent.base.visible import visible
from codescent.config.hub_keys import WEIGHTS, names_in
from codescent.config.load import LoadedConfig, about, describe, load, shipped, to_toml
from codescent.config.schema import config_schema
from codescent.config.sections import Model
from codescent.config.words import KEYS, Key, keys_markdown
from codescent.hub.cache import snapshot_of, weights_place
from codescent.jobs import site
from codescent.models import READ_CONFIG
from codescent.record import CONFIG
from codescent.verbs.arguments import SITE
from codescent.verbs.new_config import write_new

UNBROKEN = 1_000_000
"""Columns of a line where there is no terminal: a program or `grep` finds each line whole."""


ALONE = ("new", "list", "schema")
"""Options that need no CONFIG and print something else than its values."""


def main(arguments: Namespace) -> int:
    """Print the list of keys, a config, a site, or several of them; or what one option asks for.

    Raises UserError: options that exclude each other, and every problem of the config and the site.
    """
    _refuse(arguments)
    if arguments.new is not None:
        write_new(arguments.new)
    elif arguments.schema:
        print(json_text(config_schema()))
    elif arguments.list:
        _list(as_json=arguments.json)
    else:
        _values(arguments)
    return 0


def _refuse(arguments: Namespace) -> None:
    """Raise UserError for options of which one would have no effect."""
    given = [f"--{name}" for name in ALONE if getattr(arguments, name)]
    other = ["CONFIG"] * (arguments.config is not None)
    other += [f"--{name.replace('_', '-')}" for name in ("keys", "site_keys", "toml") if getattr(arguments, name)]
    other += ["--site"] * (arguments.site is not None)
    if given:
        other += ["--json"] * (arguments.json and given != ["--list"])
        if len([*given, *other]) > 1:
            raise UserError(f"{' and '.join([*given, *other])}: give one of them")
    if arguments.toml and (arguments.config is None or arguments.json or len(other) > 2):
        raise UserError("--toml: prints one config: give a CONFIG, and none of --json, --keys, --site-keys and --site")
    lists = {"CONFIG" if name == "--site" else name for name in other}
    if arguments.json and len(lists) > 1:
        raise UserError(f"--json: {' and '.join(other)} would be several lists: give one of them")


def _list(*, as_json: bool) -> None:
    """Print the shipped configs, each with the first sentence of its file."""
    found = {name: about(path) for name, path in shipped().items()}
    if as_json:
        print(json_text([{"name": name, "file": shipped()[name], "about": said} for name, said in found.items()]))
        return
    width = max(map(len, found))
    say(f"{name:{width}}  {said}" for name, said in found.items())


def _values(arguments: Namespace) -> None:
    """Print the list of keys, a config, a site, or several of them."""
    if arguments.keys and arguments.json:
        print(json_text(list(map(_key_facts, KEYS.values()))))
    elif arguments.keys:
        _show_keys(keys_markdown(), KEYS.values())
    if arguments.site_keys and arguments.json:
        print(json_text(list(map(_key_facts, site.KEYS.values()))))
    elif arguments.site_keys:
        _show_keys(site.keys_markdown(), site.KEYS.values())
    if (arguments.config or "").startswith(SITE):  # no CONFIG is given, only values of the site
        arguments.overrides, arguments.config = [arguments.config, *arguments.overrides], None
    words = [word for word in arguments.overrides if word.startswith(SITE)]
    if arguments.site is None and words:
        raise UserError(f"{words[0]}: is of a site; give --site NAME, or leave it out")
    loaded = None if arguments.site is None else site.load_site(arguments.site, words)
    rows: list[tuple[str, str, str]] = []
    if arguments.config is not None:
        arguments.overrides = [word for word in arguments.overrides if word not in words]
        resolved = resolved_of(arguments)
        if arguments.toml:
            print(to_toml(resolved.config), end="")
            return
        rows += [(f"{key.section}.{key.key}", key.value, key.origin) for key in describe(resolved)]
    elif not (arguments.keys or arguments.site_keys or loaded):
        raise UserError("codescent config: give a CONFIG to show, --site NAME, --keys, --list, --schema or --new FILE")
    of_site = [] if loaded is None else loaded.rows()
    if arguments.json and (rows or of_site):
        facts = {name: {"value": _value(value), "from": origin} for name, value, origin in [*rows, *of_site]}
        print(json_text(facts))
        return
    for table in filter(None, (rows, of_site)):
        _show(table)


def _key_facts(key: Key) -> dict[str, Any]:
    """A key, for programs. A key without a default has none."""
    default = {"default": _value(key.default)} if key.default else {}
    return {"key": f"{key.section}.{key.name}", "values": key.wanted, **default, "meaning": key.description}


def _value(toml: str) -> Any:
    """The value that a TOML text stands for."""
    return tomllib.loads(f"value = {toml}")["value"]


def resolved_of(arguments: Namespace) -> LoadedConfig:
    """Load the config and the overrides of a command line; `--ranks` overrides parallel.ranks.

    Names of a hub get their commits. Sizes that are not given come from model.weights, if there is no preset.
    Raises UserError: every problem of the config, or an unknown data.task; model.weights has no sizes; a hub lacks it.
    """
    ranks = getattr(arguments, "ranks", None)
    resolved = load(arguments.config, [*arguments.overrides, *([] if ranks is None else [f"parallel.ranks={ranks}"])])
    if resolved.config.data.task is not None and not is_own_name(resolved.config.data.task):  # which runs no code
        from codescent import tasks

        try:
            tasks.task_named(resolved.config.data.task)
        except UserError as error:
            raise UserError(*(f"{resolved.origins['data.task']}: {problem}" for problem in error.problems)) from error
    return _with_sizes(_with_commits(resolved, arguments))


def _with_commits(resolved: LoadedConfig, arguments: Namespace) -> LoadedConfig:
    """The config with the commits of its names of a hub: a run that is resumed keeps those with which it began."""
    if not names_in(resolved.config):
        return resolved
    from codescent.huggingface.named import with_commits
    from codescent.preflight import run_folder

    begun, recorded = run_folder(resolved.config) / CONFIG, dict[str, HubName]()
    if getattr(arguments, "resume", False) is not False and begun.is_file():
        recorded = names_in(load(begun).config)
    return with_commits(resolved, recorded)


def _with_sizes(resolved: LoadedConfig) -> LoadedConfig:
    """The config with the kind and the sizes of its folder model.weights, where it lacks them."""
    model, needed = resolved.config.model, ("num_layers", "num_heads", "hidden_dim", "seq_len")
    if model.kind in READ_CONFIG:
        return _with_settings(resolved)
    if model.weights is None or model.preset is not None or None not in (getattr(model, name) for name in needed):
        return resolved
    from codescent.huggingface.folder import CONFIG as MODEL_CONFIG
    from codescent.huggingface.folder import keys_of_model
    from codescent.huggingface.named import obtain_config

    try:
        if (named := names_in(resolved.config).get(WEIGHTS)) is not None:
            obtain_config(named)
        folder = weights_place(model.weights)
        where = folder / MODEL_CONFIG
        found = keys_of_model(folder)
        if model.kind not in (None, found["kind"]):
            raise UserError(f'{where} is of a {found["kind"]}, but model.kind = "{model.kind}"')
        missing = {name: value for name, value in found.items() if getattr(model, name) is None}
        filled = Model(**{**model.model_dump(), **missing})
    except UserError as error:
        raise UserError(*(f"model.weights: {problem}" for problem in error.problems)) from error
    except ValidationError as error:  # a number that our models do not support
        wrong = [f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}" for detail in error.errors(include_url=False)]
        raise UserError(*(f"model.weights: {where}: {problem}" for problem in wrong)) from error
    origins = {**resolved.origins, **{f"model.{name}": str(where) for name in missing}}
    return dataclasses.replace(resolved, config=resolved.config.model_copy(update={"model": filled}), origins=origins)


def _with_settings(resolved: LoadedConfig) -> LoadedConfig:
    """The config with the content of the config.json that model.config, or else model.weights, names."""
    model = resolved.config.model
    key = "weights" if model.config is None else "config"
    value = model.weights if model.config is None else model.config
    if value is None or str(value).startswith("{"):
        return resolved
    from codescent.hub.obtain import pinned
    from codescent.huggingface.any_model import read_settings
    from codescent.huggingface.named import obtain_config

    try:
        if is_hub_name(value):
            named = pinned(parse(str(value)))
            obtain_config(named)
            value = snapshot_of(named)
        text = read_settings(Path(value))
    except UserError as error:
        raise UserError(*(f"model.{key}: {problem}" for problem in error.problems)) from error
    origins = {**resolved.origins, "model.config": str(value)}
    filled = model.model_copy(update={"config": text})
    return dataclasses.replace(resolved, config=resolved.config.model_copy(update={"model": filled}), origins=origins)


def _show_keys(markdown: str, keys: Iterable[Key]) -> None:
    """Print the list of keys: as Markdown for a file or a program, as text of the window's width on a terminal."""
    if not sys.stdout.isatty():
        print(markdown)
        return
    console = new_console()
    for section, of_section in groupby(keys, key=lambda key: key.section):
        console.print(Text(f"\n[{section}]", style="bold"))
        for key in of_section:
            console.print(Text(f"{key.name} = {key.default}", style="bold"))
            said = (Text(key.wanted, style="dim"), Text(key.description.replace("`", "")))
            for text in said:
                console.print(Padding(text, (0, 0, 0, 4)))


def _show(rows: Iterable[tuple[str, str, str]]) -> None:
    """Print keys with their values and origins."""
    table = Table(box=box.SIMPLE, pad_edge=False)
    for heading in ("key", "value", "from"):
        table.add_column(heading, overflow="fold")
    for name, value, origin in rows:
        shown = origin.removeprefix(f"{Path.cwd()}/")
        table.add_row(name, visible(value), visible(shown), style="dim" if origin == "default" else "")
    width = None if sys.stdout.isatty() else UNBROKEN
    new_console(width=width).print(table, markup=False)
