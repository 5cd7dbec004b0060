"""In: a config, a layout that was found for it. Out: a config file with this layout, on top of the config.
Does not find a layout (planner/ does)."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from codescent.base.refusal import Value
from codescent.config.effects import value_of
from codescent.config.load import COMMAND_LINE, DEFAULT, LoadedConfig, shipped
from codescent.config.words import toml_value
from codescent.planner.search.auto import GIVEN, is_open
from codescent.planner.search.space import default_of
from codescent.verbs.script_file import write_new


def write_layout(arguments: Namespace, loaded: LoadedConfig, said: str, change: Mapping[str, Value]) -> None:
    """Write --out, as a whole or not at all.

    Args:
        arguments: of the command. What they change of the config is in the file, too.
        loaded: their config.
        said: what the layout is.
        change: the layout. Keys that have their default, and are not given, are left out.

    Raises:
        UserError: the file is there by now, or cannot be written.
    """
    out = arguments.out
    own = {key for key, origin in loaded.origins.items() if origin == COMMAND_LINE}
    values: dict[str, Any] = {key: value_of(loaded.config, key) for key in sorted(own)}
    values |= {"parallel.ranks": (arguments.ranks or [loaded.config.parallel.ranks])[0]}
    values |= GIVEN if is_open(loaded.config) else {}
    for key, value in change.items():
        if value != default_of(key) or loaded.origins[key] != DEFAULT:  # of --free; what stays is not in the change
            values[key] = value
    lines = [f"# {said}.", f"base = {toml_value(_base(out, arguments.config))}"]
    for section in dict.fromkeys(key.partition(".")[0] for key in values):
        lines += ["", f"[{section}]"]
        here = {key.partition(".")[2]: value for key, value in values.items() if key.startswith(f"{section}.")}
        lines += [f"{name} = {toml_value(value)}" for name, value in here.items()]
    write_new(out, "\n".join(lines) + "\n")


def _base(out: Path, config: str) -> str:
    """The config as the new file names it: a shipped one by its name, another by its path from the file."""
    if not Path(config).is_file() and Path(config).stem in shipped():
        return f"{Path(config).stem}.toml"
    return os.path.relpath(Path(config).absolute(), out.absolute().parent)
