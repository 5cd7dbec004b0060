"""In: a config and overrides. Out: the resolved config; a table of every key, its value and where that comes from.
Does not read files or check values (config/ does)."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from codescent.base.errors import UserError
from codescent.base.visible import visible
from codescent.config.load import LoadedConfig, describe, load
from codescent.config.words import keys_markdown


def main(arguments: Namespace) -> int:
    """Print the list of keys, a config, or both."""
    if arguments.keys:
        print(keys_markdown())
    if arguments.config is not None:
        _show(resolved_of(arguments))
    elif not arguments.keys:
        raise UserError("codescent config: give a CONFIG to show, or --keys")
    return 0


def resolved_of(arguments: Namespace) -> LoadedConfig:
    """Load the config and the overrides of a command line; `--ranks` overrides parallel.ranks.

    Raises UserError: every problem of the config, or an unknown data.task.
    """
    ranks = getattr(arguments, "ranks", None)
    resolved = load(arguments.config, [*arguments.overrides, *([] if ranks is None else [f"parallel.ranks={ranks}"])])
    if resolved.config.data.task is not None:
        from codescent import tasks

        try:
            tasks.task_named(resolved.config.data.task)
        except UserError as error:
            raise UserError(*(f"{resolved.origins['data.task']}: {problem}" for problem in error.problems)) from error
    return resolved


def _show(resolved: LoadedConfig) -> None:
    table = Table(box=box.SIMPLE, pad_edge=False)
    for heading in ("key", "value", "from"):
        table.add_column(heading, overflow="fold")
    for section, key, value, origin in describe(resolved):
        shown = origin.removeprefix(f"{Path.cwd()}/")
        table.add_row(f"{section}.{key}", visible(value), visible(shown), style="dim" if origin == "default" else "")
    Console(highlight=False).print(table, markup=False)
