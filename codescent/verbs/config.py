"""In: a config, a site, overrides. Out: the resolved config; tables of every key, its value and where that comes from.
Does not read TOML files or check values (config/ and jobs/site.py do)."""

from __future__ import annotations

import dataclasses
import sys
from argparse import Namespace
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

from pydantic import ValidationError
from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from codescent.base.errors import UserError
from codescent.base.hub_name import HubName
from codescent.base.visible import visible
from codescent.config.hub_keys import WEIGHTS, names_in
from codescent.config.load import LoadedConfig, describe, load
from codescent.config.sections import Model
from codescent.config.words import KEYS, Key, keys_markdown
from codescent.hub.cache import weights_place
from codescent.jobs import site
from codescent.record import CONFIG
from codescent.verbs.arguments import SITE

UNBROKEN = 1_000_000
"""Columns of a line where there is no terminal: a program or `grep` finds each line whole."""


def main(arguments: Namespace) -> int:
    """Print the list of keys, a config, a site, or several of them."""
    if arguments.keys:
        _show_keys(keys_markdown(), KEYS.values())
    if arguments.site_keys:
        _show_keys(site.keys_markdown(), site.KEYS.values())
    if (arguments.config or "").startswith(SITE):  # no CONFIG is given, only values of the site
        arguments.overrides, arguments.config = [arguments.config, *arguments.overrides], None
    words = [word for word in arguments.overrides if word.startswith(SITE)]
    if arguments.site is None and words:
        raise UserError(f"{words[0]}: is of a site; give --site NAME, or leave it out")
    loaded = None if arguments.site is None else site.load_site(arguments.site, words)
    if arguments.config is not None:
        arguments.overrides = [word for word in arguments.overrides if word not in words]
        _show((f"{key.section}.{key.key}", key.value, key.origin) for key in describe(resolved_of(arguments)))
    elif not (arguments.keys or arguments.site_keys or loaded):
        raise UserError("codescent config: give a CONFIG to show, --site NAME or --keys")
    if loaded is not None:
        _show(loaded.rows())
    return 0


def resolved_of(arguments: Namespace) -> LoadedConfig:
    """Load the config and the overrides of a command line; `--ranks` overrides parallel.ranks.

    Names of a hub get their commits. Sizes that are not given come from model.weights, if there is no preset.
    Raises UserError: every problem of the config, or an unknown data.task; model.weights has no sizes; a hub lacks it.
    """
    ranks = getattr(arguments, "ranks", None)
    resolved = load(arguments.config, [*arguments.overrides, *([] if ranks is None else [f"parallel.ranks={ranks}"])])
    if resolved.config.data.task is not None:
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


def _show_keys(markdown: str, keys: Iterable[Key]) -> None:
    """Print the list of keys: as Markdown for a file or a program, as text of the window's width on a terminal."""
    if not sys.stdout.isatty():
        print(markdown)
        return
    console = Console(highlight=False)
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
    Console(highlight=False, width=width).print(table, markup=False)
